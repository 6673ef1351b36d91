"""Processes of acceptance: one for each part, and one for each rank of a part's case. Torch-free.

A case has its own processes, so that its device memory, process groups and engines end with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rlhpc
from bench.acceptance.results import IS_TRUE, Context, Figure, Skipped
from rlhpc.core import env
from rlhpc.core.process import ProcessId
from rlhpc.launch.machine import common_environment, free_port

TRAINER = ("rlhpc.backends.megatron",)
BOTH = (*TRAINER, "rlhpc.rollout.vllm_engine", "vllm.v1.engine.llm_engine")
_CHECKOUT = Path(__file__).resolve().parents[2]
# Set in the processes of a launcher that may have started this command.
_OF_LAUNCHERS = {env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.RLHPC_ROLE, env.SLURM_PROCID}
_LOG_LINES = 15
_DRAIN_SECONDS = 2.0  # to read the last messages of an ended process
_CLOSING_SECONDS = 30.0  # for a serving process and its engine to end
_LOOK_SECONDS = 1.0  # between scans for processes that these have started
_END_SECONDS = 10.0  # for killed processes to disappear


class WorkerFailed(Exception):
    """A process raised or died. The message is one line."""


class OutOfTime(Exception):
    """The processes exceeded their deadline."""


@dataclass(frozen=True)
class WorkerCall:
    """Call of function(context, **arguments) in ``ranks`` new processes.

    ``name``: name of the case; output goes to ``<name>.log`` in the part's folder. ``imports``: modules imported before
    the case's turn. ``share_gpu``: every rank uses the first GPU.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    imports: Sequence[str] = ()
    share_gpu: bool = False


class Workers:
    """Running processes of one call. A context manager that kills them, with all their descendants, on exit.

    ``environment``: of a part's own process, which is no rank. ``deadline``: on the monotonic clock, which all
    processes of a machine share.
    """

    def __init__(
        self,
        context: Context,
        call: WorkerCall,
        environment: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> None:
        self._context, self._call, self._deadline = context, call, deadline
        self._messages: queue.Queue[tuple[int, str, Any]] = queue.Queue()
        self._closed = False
        self._family: set[ProcessId] = set()
        folder = context.folder / "calls"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = context.folder / f"{call.name.replace(' ', '-').replace(',', '')}.log"
        spec = {**asdict(call), "folder": str(context.folder), "size": context.size, "on_gpu": context.on_gpu}
        file = folder / f"{self.log.stem}.json"
        spec |= {"deadline": deadline, "parent": asdict(ProcessId.own())}
        file.write_text(json.dumps(spec), encoding="utf-8")
        common = environment or {**os.environ, **_rank_environment(call.ranks, context)}
        command = [sys.executable, "-m", "bench.acceptance.worker", str(file)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes: list[subprocess.Popen[str]] = []
        with open(self.log, "ab") as log:
            for rank in range(call.ranks):
                own = {env.RANK: str(rank), env.LOCAL_RANK: "0" if call.share_gpu else str(rank)}
                variables = {**common, **({} if environment else own)}
                process = subprocess.Popen(command, env=variables, stderr=log, start_new_session=True, **pipes)
                self._processes.append(process)
        pairs = enumerate(self._processes)
        self._watches = [threading.Thread(target=self._watch, args=pair, daemon=True) for pair in pairs]
        for watch in self._watches:
            watch.start()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes, their groups and their descendants in any session; closed ones get time to end first."""
        for watch in self._watches if self._closed else ():
            watch.join(_CLOSING_SECONDS)
        self._look()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for member in self._family:
            member.kill_group()
        for watch, process in zip(self._watches, self._processes, strict=True):
            watch.join()  # until then the process is a zombie, whose pid and group cannot be reused
            process.wait()
        until = time.monotonic() + _END_SECONDS
        while any(member.is_alive() for member in self._family) and time.monotonic() < until:
            time.sleep(0.1)
        self.close()

    def close(self) -> None:
        """Ask serving processes to end."""
        self._closed = True
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]

    def go(self) -> None:
        """Let the processes begin as soon as their imports are done."""
        for process in self._processes:
            with contextlib.suppress(OSError):  # it has failed; its message follows
                print(file=process.stdin, flush=True)

    def finish(self) -> list[Any]:
        """Wait for the end, reporting results as they arrive, and return each rank's value. Raises WorkerFailed."""
        values: dict[int, Any] = {}
        while len(values) < self._call.ranks:
            rank, kind, value = self._next()
            if kind == "done":
                values[rank] = value
        return [values[rank] for rank in range(self._call.ranks)]

    def ask(self) -> Any:
        """Request and return the next item of a serving process of one rank. Raises WorkerFailed."""
        self.go()
        return self.answer()

    def answer(self) -> Any:
        """The next item of a serving process of one rank. Raises WorkerFailed."""
        while True:
            _, kind, value = self._next()
            if kind == "answer":
                return value

    def _next(self) -> tuple[int, str, Any]:
        rank, kind, value = self._message()
        if kind == "figure":
            self._context.report(Figure(**value))
        elif kind == "skipped":
            self._context.report(Skipped(**value))
        elif kind == "log":
            self._context.log(f"{self._call.name}: {value}")
        elif kind == "failed":
            raise WorkerFailed(value)
        return rank, kind, value

    def _message(self) -> tuple[int, str, Any]:
        while self._deadline is None or time.monotonic() < self._deadline:
            left = _LOOK_SECONDS if self._deadline is None else self._deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=max(0.0, min(_LOOK_SECONDS, left)))
            self._look()
        raise OutOfTime

    def _look(self) -> None:
        """Remember descendants: /proc no longer links them to a process that has crashed."""
        for process in self._processes:
            self._family |= descendants(process.pid)

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        """Read a process's messages until it ends; processes that it forked may hold its pipe open longer."""
        finished = threading.Event()
        reader = threading.Thread(target=self._read, args=(rank, process, finished), daemon=True)
        reader.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        reader.join(_DRAIN_SECONDS)
        if not finished.is_set():
            self._messages.put((rank, "failed", _death(process.pid)))

    def _read(self, rank: int, process: subprocess.Popen[str], finished: threading.Event) -> None:
        for line in process.stdout or ():
            message = json.loads(line)
            if message["kind"] in ("done", "failed"):
                finished.set()
            self._messages.put((rank, message["kind"], message["value"]))


def _death(pid: int) -> str:
    """End of a process that is now a zombie."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    names = {int(number): number.name for number in signal.Signals}
    status = ended.si_status
    return f"exit code {status}" if ended.si_code == os.CLD_EXITED else f"killed by {names.get(status, status)}"


def descendants(pid: int) -> set[ProcessId]:
    """All processes below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, left = set(), [pid]
    while left:
        below = children.get(left.pop(), [])
        found |= {member for child in below if (member := ProcessId.of(child)) is not None}
        left += below
    return found


def run_each(context: Context, calls: Sequence[WorkerCall]) -> list[list[Any] | None]:
    """Run calls in order and return each rank's value per call; a failed call gives None and a missed goal."""
    values: list[list[Any] | None] = []
    for call, (workers,) in zip(calls, started_ahead(context, [[call] for call in calls]), strict=True):
        workers.go()
        try:
            values.append(workers.finish())
        except WorkerFailed as error:
            report_failure(context, call, workers, error)
            values.append(None)
    return values


def run_lanes(context: Context, lanes: Sequence[Sequence[WorkerCall]]) -> None:
    """Run several sequences of calls concurrently, each as ``run_each``; their reports interleave."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        for lane in [pool.submit(run_each, context, calls) for calls in lanes]:
            lane.result()


def report_failure(context: Context, call: WorkerCall, workers: Workers, error: WorkerFailed) -> None:
    """Report a failed call as a missed goal, and log the end of its output."""
    lines = workers.log.read_text(errors="replace").splitlines()
    context.log("\n".join([f"{call.name}: {error}", *end_of(lines)]))
    context.report(Figure(f"{call.name}: completed", value=False, goal=IS_TRUE, note=str(error)))


def end_of(lines: Sequence[str]) -> Sequence[str]:
    """The last lines, or those around the first line of a crash, which the stacks of all threads follow."""
    fatal = next((place for place, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    first = max(0, min(len(lines) - _LOG_LINES, fatal - _LOG_LINES // 2))
    return lines[first : first + _LOG_LINES]


def started_ahead(context: Context, groups: Sequence[Sequence[WorkerCall]]) -> Iterator[list[Workers]]:
    """Processes of each group of calls in turn, waiting for ``go``. Taking the next group kills the current one.

    The next group's processes import their modules while the current group works: most of their startup time on a GPU
    machine.
    """
    with contextlib.ExitStack() as following:
        started = [following.enter_context(Workers(context, call)) for call in groups[0]]
        for after in [*groups[1:], []]:
            with following.pop_all():
                upcoming = [following.enter_context(Workers(context, call)) for call in after]
                yield started
                started = upcoming


def part_environment(scratch: Path, *, on_gpu: bool) -> dict[str, str]:
    """Environment of a part, without variables of a launcher around it, and as of a rank where it is not one.

    All processes of the part find bench by PYTHONPATH, and this process's rlhpc, not one in their working folder.
    """
    own = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    code = _CHECKOUT
    if not Path(rlhpc.__file__).resolve().is_relative_to(code):
        (code := scratch / "path").mkdir()  # bench alone: rlhpc of the checkout would take precedence
        (code / "bench").symlink_to(_CHECKOUT / "bench")
    path = os.pathsep.join(filter(None, [str(code), own.get(env.PYTHONPATH)]))
    settings = {env.HF_HUB_OFFLINE: "1", env.TOKENIZERS_PARALLELISM: "false"}
    settings[env.CUDA_DEVICE_MAX_CONNECTIONS if on_gpu else env.TORCHDYNAMO_DISABLE] = "1"
    return {**own, **settings, env.PYTHONPATH: path, "PYTHONSAFEPATH": "1"}


def _rank_environment(ranks: int, context: Context) -> dict[str, str]:
    """Environment of ranks, as the launcher sets it. Tiny sizes use one thread, since cases share the cores."""
    threads = 1 if context.tiny else max(1, len(os.sched_getaffinity(0)) // ranks)
    settings = common_environment("127.0.0.1", free_port(), threads, gpus=context.on_gpu)
    settings |= {env.WORLD_SIZE: str(ranks), env.LOCAL_WORLD_SIZE: str(ranks)}
    settings |= {env.VLLM_HOST_IP: "127.0.0.1", env.VLLM_NO_USAGE_STATS: "1", env.DO_NOT_TRACK: "1"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        settings[env.GLOO_SOCKET_IFNAME] = "lo"
    return settings

"""Starts the processes of a part. Each case has its own, so that its device memory, process groups and engines end
with them. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.acceptance.channel import result_of
from bench.acceptance.part import IS_TRUE, Context, Figure
from rlhpc.core import env
from rlhpc.core.process import ProcessId
from rlhpc.launch.machine import common_environment, free_port

TRAINER = ("rlhpc.backends.megatron",)
ENGINE = ("rlhpc.rollout.vllm_engine", "vllm.v1.engine.llm_engine")
BOTH = (*TRAINER, *ENGINE)
_LOG_LINES = 15
_DRAIN_SECONDS = 2.0  # to read the last messages of an ended process
_CLOSING_SECONDS = 30.0  # for a serving process and its engine to end


class WorkerFailed(Exception):
    """A process of a part raised or died. The message is one line."""


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
    """Running processes of one call. A context manager that kills them on exit."""

    def __init__(self, context: Context, call: WorkerCall) -> None:
        self._context, self._call = context, call
        self._messages: queue.Queue[tuple[int, str, Any]] = queue.Queue()
        self._closed = False
        self._folder = context.folder / "calls"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.log = context.folder / f"{call.name.replace(' ', '-').replace(',', '')}.log"
        file = self._folder / f"{self.log.stem}.json"
        file.write_text(json.dumps(self._description()), encoding="utf-8")
        common = {**os.environ, **_environment(call.ranks, context)}
        with open(self.log, "ab") as log:
            self._processes = [self._start(file, rank, common, log.fileno()) for rank in range(call.ranks)]
        self._leaders = [ProcessId.of(process.pid) for process in self._processes]
        for rank, process in enumerate(self._processes):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the processes and their descendants; closed ones get time to end first."""
        for process, leader in zip(self._processes, self._leaders, strict=True):
            if self._closed:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CLOSING_SECONDS)
            if leader is not None:
                leader.kill_group()
            process.wait()
        self.close()

    def close(self) -> None:
        """Ask serving processes to end."""
        self._closed = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()

    def go(self) -> None:
        """Let the processes begin as soon as their imports are done."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has failed; its message follows
                process.stdin.write("\n")
                process.stdin.flush()

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
        rank, kind, value = self._messages.get()
        if kind in ("figure", "skipped"):
            self._context.report(result_of(kind, value))
        elif kind == "log":
            self._context.log(f"{self._call.name}: {value}")
        elif kind == "failed":
            raise WorkerFailed(value)
        elif kind == "died":
            raise WorkerFailed(f"a process ended with {value}: {self._tail()}")
        return rank, kind, value

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        """Read a process's messages until it ends; processes that it forked may hold its pipe open longer."""
        finished = threading.Event()
        reader = threading.Thread(target=self._read, args=(rank, process, finished), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(_DRAIN_SECONDS)
        if not finished.is_set():
            self._messages.put((rank, "died", f"signal {-code}" if code < 0 else f"exit code {code}"))

    def _read(self, rank: int, process: subprocess.Popen[str], finished: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            self._messages.put((rank, message["kind"], message["value"]))
            if message["kind"] in ("done", "failed"):
                finished.set()

    def _tail(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no output"

    def _description(self) -> dict[str, Any]:
        context, call = self._context, self._call
        return {
            "function": call.function,
            "arguments": dict(call.arguments),
            "imports": list(call.imports),
            "folder": str(context.folder),
            "size": context.size,
            "on_gpu": context.on_gpu,
            "parent": asdict(ProcessId.own()),
        }

    def _start(self, file: Path, rank: int, common: Mapping[str, str], log: int) -> subprocess.Popen[str]:
        own = {env.RANK: str(rank), env.LOCAL_RANK: "0" if self._call.share_gpu else str(rank)}
        return subprocess.Popen(
            [sys.executable, "-m", "bench.acceptance.worker", str(file)],
            env={**common, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def run(context: Context, call: WorkerCall) -> list[Any]:
    """Run one call and return each rank's value. Raises WorkerFailed."""
    with Workers(context, call) as workers:
        workers.go()
        return workers.finish()


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


def _environment(ranks: int, context: Context) -> dict[str, str]:
    """Environment of a rank, as the launcher sets it. Tiny sizes use one thread, since cases share the cores."""
    threads = 1 if context.tiny else max(1, len(os.sched_getaffinity(0)) // ranks)
    settings = common_environment("127.0.0.1", free_port(), threads, gpus=context.on_gpu)
    settings |= {env.WORLD_SIZE: str(ranks), env.LOCAL_WORLD_SIZE: str(ranks)}
    settings |= {env.VLLM_HOST_IP: "127.0.0.1", env.VLLM_NO_USAGE_STATS: "1", env.DO_NOT_TRACK: "1"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        settings[env.GLOO_SOCKET_IFNAME] = "lo"
    return settings

"""Runs a part in its own process, with a time limit and without leftover processes. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlhpc
from bench.acceptance.child import Spec
from bench.acceptance.part import Figure, Goal, Part, Size, Skipped
from rlhpc.core import env
from rlhpc.core.process import ProcessId, oom_kills

_POLL_SECONDS = 0.1
# Set in the processes of a launcher.
_OF_LAUNCHERS = {env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.RLHPC_ROLE, env.SLURM_PROCID}
_LOOK_SECONDS = 1.0  # between scans for processes that a part has started
_END_SECONDS = 10.0  # for killed processes to disappear


@dataclass(frozen=True)
class PartExit:
    """How a part's process ended. ``code``: negative for a signal, None for a timeout."""

    code: int | None
    error: str  # as the process reported it; empty if it reported none
    oom: bool  # the kernel's OOM killer was active meanwhile

    @property
    def message(self) -> str:
        """Why the part failed, in one line."""
        more = "; the kernel's OOM killer ended a process" if self.oom else ""
        if self.code is None:
            return f"exceeded its limit{more}"
        if self.error:
            return self.error + more
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}{more}"
        return f"exit code {self.code}{more}"


def run_part(
    part: Part, size: Size, scratch: Path, output: Path, report: Callable[[Figure | Skipped], None], *, on_gpu: bool
) -> PartExit:
    """Run ``part`` in the folder ``scratch`` with its output in the file ``output``, and pass each result to ``report``
    as it arrives. No process of the part outlives this call, even if it raises."""
    deadline, oom_before = time.monotonic() + 60 * part.minutes, oom_kills()
    folder, channel = scratch / "work", Path(scratch, "results.jsonl")
    folder.mkdir()
    channel.touch()
    own = ProcessId.own()
    spec = Spec(part.function, str(folder), str(channel), size, on_gpu, deadline, own.pid, own.start)
    with open(output, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "bench.acceptance.child", spec.text],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(scratch, on_gpu=on_gpu),
        )
    lines, error = _Lines(channel), ""

    def forward() -> None:
        nonlocal error
        for line in lines.read_new():
            if "error" in line:
                error = str(line["error"])
            else:
                report(_result(line))

    family: set[ProcessId] = set()
    try:
        look = 0.0
        while (in_time := time.monotonic() < deadline) and not _has_ended(process.pid):
            if time.monotonic() >= look:
                family |= descendants(process.pid)
                look = time.monotonic() + _LOOK_SECONDS
            time.sleep(_POLL_SECONDS)
            forward()
    finally:
        end_tree(process, family)
    forward()
    return PartExit(process.returncode if in_time else None, error, oom_kills() > oom_before)


def end_tree(process: subprocess.Popen[bytes], family: set[ProcessId]) -> None:
    """Kill the process, its group and its descendants in any session, and wait until they are gone.

    ``family``: descendants seen earlier, which /proc no longer links to a process that has crashed. The process is
    still a zombie, so its pid and process group cannot have been reused.
    """
    family = family | descendants(process.pid)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process.pid, signal.SIGKILL)
    for member in family:
        member.kill_group()
    process.wait()
    until = time.monotonic() + _END_SECONDS
    while any(member.is_alive() for member in family) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


class _Lines:
    """JSON objects that another process appends to a file, each read once and only when complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def read_new(self) -> Iterator[dict[str, Any]]:
        with open(self._path, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def _result(line: dict[str, Any]) -> Figure | Skipped:
    if "skipped" in line:
        return Skipped(**line["skipped"])
    fields = line["figure"]
    goal = Goal(**fields["goal"]) if fields["goal"] else None
    return Figure(**{**fields, "goal": goal})


def environment(scratch: Path, *, on_gpu: bool) -> dict[str, str]:
    """Environment of a run's ranks, for parts that train or generate in their own process, without variables of a
    launcher that started this command.

    All processes of the part find bench by PYTHONPATH, and this process's rlhpc, not one in their working folder.
    """
    own = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    checkout, found = Path(__file__).resolve().parents[2], Path(rlhpc.__file__).resolve()
    if not found.is_relative_to(checkout):  # a folder with bench alone: rlhpc of the checkout would take precedence
        (alone := scratch / "path").mkdir()
        (alone / "bench").symlink_to(checkout / "bench")
        checkout = alone
    path = os.pathsep.join(filter(None, [str(checkout), own.get("PYTHONPATH")]))
    return {
        **own,
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        env.HF_HUB_OFFLINE: "1",
        env.TOKENIZERS_PARALLELISM: "false",
        env.CUDA_DEVICE_MAX_CONNECTIONS if on_gpu else env.TORCHDYNAMO_DISABLE: "1",
    }


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays a zombie, which reserves its pid."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

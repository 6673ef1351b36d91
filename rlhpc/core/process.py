"""Identity, end, suspensions and CPU time of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK_SECONDS, _LATE_SECONDS = 1.0, 5.0
_CPU_SHARE = 0.1  # a thread that is late while the process computes only waits for the interpreter
_AFTER_SECONDS = 30.0


@dataclass(frozen=True)
class ProcessId:
    """Unique identity of a process: pids are reused, but not with the same start (in clock ticks since boot)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Process with this pid; None if there is none or it is a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()  # the name before the bracket may contain blanks
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @classmethod
    def own(cls) -> ProcessId:
        """This process."""
        process = cls.of(os.getpid())
        assert process is not None
        return process

    def is_alive(self) -> bool:
        """True if it runs; a zombie does not."""
        return ProcessId.of(self.pid) == self

    def kill_group(self) -> None:
        """Kills the process and, if it leads a process group, the rest of the group."""
        if ProcessId.of(self.pid) not in (self, None):
            return  # another process has the pid: the group has ended too
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)


def die_with(other: ProcessId, poll_seconds: float = 0.5) -> None:
    """Kills this process, and its process group if it leads one, soon after ``other`` ends."""
    own = ProcessId.own()

    def watch() -> None:
        while other.is_alive():
            time.sleep(poll_seconds)
        own.kill_group()

    threading.Thread(target=watch, name="die-with", daemon=True).start()


def oom_kills() -> int:
    """Number of processes that the kernel has killed for lack of memory since this machine booted."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


_spent: list[float] = []  # appended to by any thread


@contextlib.contextmanager
def observing() -> Iterator[None]:
    """Counts the CPU time of the calling thread. Not to be nested."""
    began = time.thread_time()
    try:
        yield
    finally:
        _spent.append(time.thread_time() - began)


def take_observing_seconds() -> float:
    """Seconds counted since the last call."""
    global _spent
    taken, _spent = _spent, []
    return sum(taken)


class Pauses:
    """Watches the clock in a thread. ``seconds``: suspended so far; ``ended``: end of the last pause."""

    def __init__(self) -> None:
        self.seconds, self.ended = 0.0, float("-inf")
        threading.Thread(target=self._watch, name="pauses", daemon=True).start()

    @property
    def just_ended(self) -> bool:
        """True if a pause ended in the last half minute, so that times of before may not hold."""
        return time.monotonic() - self.ended < _AFTER_SECONDS

    def _watch(self) -> None:
        while True:
            began, cpu = time.monotonic(), time.process_time()
            time.sleep(_TICK_SECONDS)
            late = time.monotonic() - began - _TICK_SECONDS
            if late > _LATE_SECONDS and time.process_time() - cpu < _CPU_SHARE * late:
                self.seconds, self.ended = self.seconds + late, time.monotonic()

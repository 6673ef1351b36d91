"""Processes seen from outside, through /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it is gone or a zombie.

    Together with the pid this names a process for good: pids are used again.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before the bracket may hold blanks
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int) -> bool:
    """The process runs; one that ended and was not yet waited for does not."""
    return start_ticks(pid) is not None


def die_with(pid: int, poll_seconds: float = 0.5) -> None:
    """From now on this process, and its process group if it leads one, is killed soon after process ``pid`` ends."""
    first = start_ticks(pid)

    def watch() -> None:
        while first is not None and start_ticks(pid) == first:
            time.sleep(poll_seconds)
        kill_group(os.getpid())

    threading.Thread(target=watch, name="die-with-launcher", daemon=True).start()


def kill_group(pid: int) -> None:
    """SIGKILL to the process and, if it leads a process group, to all of the group; silent when they are gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def oom_kills() -> int:
    """Processes that the kernel ended for want of memory on this machine since it was started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

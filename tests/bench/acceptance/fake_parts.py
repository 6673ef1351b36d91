"""Fake parts for tests. Each function runs in a real process of acceptance and ends in a different way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.acceptance.results import Context, Figure, Goal, Part, Skipped
from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo

LIMIT = 2.0  # minutes, far more than any of these needs
_FOREVER = 3600.0


def part(name: str, function: str | None = None, minutes: float = LIMIT, needs_gpu: bool = False) -> Part:
    """A part with the function of that name in this module."""
    return Part(name, f"Part {name}", "first", minutes, f"{__name__}:{function or name}", needs_gpu)


def good(context: Context) -> None:
    context.report(Figure("speed", 12.5, "GB/s", Goal(">", 10.0), "a|b"))
    context.report(Figure("right", True, "", Goal("==", True)))
    context.report(Figure("kernel", "flash"))


def slow_sync(context: Context) -> None:
    """Misses one of two goals."""
    context.report(Figure("8b: seconds", 0.31, "s", Goal("<", 0.05)))
    context.report(Figure("8b: bandwidth", 900.0, "GB/s", Goal(">", 100.0)))


def not_finite(context: Context) -> None:
    context.report(Figure("loss", float("nan"), "", Goal("<", 10.0)))


def crash(context: Context) -> None:
    context.report(Figure("before", 1.0))
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def error(context: Context) -> None:
    raise RuntimeError("no such | kernel")


def leak(context: Context) -> None:
    """Prints a secret by all ways, and raises it."""
    secret = os.environ["SITE_PASSWORD"]
    print("printed", secret, flush=True)
    os.write(2, f"written {secret}\n".encode())
    raise RuntimeError(f"401 for {secret}")


def user_error(context: Context) -> None:
    raise UserError("7 is not allowed", where="rollout.tp", remedy="use 1")


def nothing(context: Context) -> None:
    pass


def cases(context: Context) -> None:
    context.report(Figure("one case", 1.0))
    context.report(Skipped("several GPUs", "needs 2 GPUs"))


def hang(context: Context) -> None:
    """Hangs with a process in its own session, like a run's ranks; its id is in the file "hanging"."""
    context.report(Figure("before", 1.0))
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_FOREVER})"], start_new_session=True)
    Path("hanging").write_text(str(child.pid))
    time.sleep(_FOREVER)


def orphan(context: Context) -> None:
    """Crashes while a process in its own session is running."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_FOREVER})"], start_new_session=True)
    Path("hanging").write_text(str(child.pid))
    time.sleep(1.5)  # the driver has scanned its processes
    os.kill(os.getpid(), signal.SIGKILL)


def until_released(context: Context) -> None:
    """Reports, then waits for the file "released"."""
    context.report(Figure("begun", float(os.getpid())))
    while not Path("released").exists():
        time.sleep(0.05)
    context.report(Figure("released", True))


def rank(context: Context) -> None:
    """Reports the launcher variables of this process."""
    info = RankInfo.from_environ()
    context.report(Figure("rank", f"{info.rank} of {info.world_size}"))


def loud(context: Context) -> None:
    """Prints more than a log stores, and fails."""
    print("first line")
    for number in range(60_000):
        print(f"line {number} of much output")
    raise RuntimeError("enough")

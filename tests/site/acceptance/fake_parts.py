"""Parts of the tests' own. Each function runs in a real process of acceptance and ends in one way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo
from rlhpc.site.acceptance.part import Context, Figure, Goal, Part, Skipped

LIMIT = 2.0  # minutes, far more than any of these takes
_FOREVER = 3600.0


def part(name: str, function: str | None = None, minutes: float = LIMIT, needs_gpu: bool = False) -> Part:
    """A part whose function is the one of that name here."""
    return Part(name, f"Part {name}", "first", minutes, f"{__name__}:{function or name}", needs_gpu)


def good(context: Context) -> None:
    context.report(Figure("speed", 12.5, "GB/s", Goal(">", 10.0), "a|b"))
    context.report(Figure("right", True, "", Goal("==", True)))
    context.report(Figure("kernel", "flash"))


def slow_sync(context: Context) -> None:
    """Misses one goal of two."""
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


def user_error(context: Context) -> None:
    raise UserError("7 is not allowed", where="rollout.tp", remedy="use 1")


def nothing(context: Context) -> None:
    pass


def cases(context: Context) -> None:
    context.report(Figure("one case", 1.0))
    context.report(Skipped("several GPUs", "needs 2 GPUs"))


def hang(context: Context) -> None:
    """With a process in a session of its own, as the ranks of a run lead; its id is left in the file "hanging"."""
    context.report(Figure("before", 1.0))
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_FOREVER})"], start_new_session=True)
    Path("hanging").write_text(str(child.pid))
    time.sleep(_FOREVER)


def orphan(context: Context) -> None:
    """Crashes while a process in a session of its own is at work."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_FOREVER})"], start_new_session=True)
    Path("hanging").write_text(str(child.pid))
    time.sleep(1.5)  # the driver has looked
    os.kill(os.getpid(), signal.SIGKILL)


def until_released(context: Context) -> None:
    """Reports, and then waits for the file "released"."""
    context.report(Figure("begun", float(os.getpid())))
    while not Path("released").exists():
        time.sleep(0.05)
    context.report(Figure("released", True))


def rank(context: Context) -> None:
    """Who this process believes to be."""
    info = RankInfo.from_environ()
    context.report(Figure("rank", f"{info.rank} of {info.world_size}"))


def loud(context: Context) -> None:
    """Prints more than a log keeps, and fails."""
    print("first line")
    for number in range(60_000):
        print(f"line {number} of much output")
    raise RuntimeError("enough")

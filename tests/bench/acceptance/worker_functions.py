"""Functions that the processes of test_workers.py run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from typing import Any

from bench.acceptance.results import Context, Figure, Goal, Skipped


def report(context: Context, value: float) -> dict[str, Any]:
    print("a library's print")
    context.log("at work")
    context.report(Figure("seconds", value, "s", Goal("<", 1.0), "a note"))
    context.report(Skipped("graphs", "no GPU"))
    return {"value": value, "rank": os.environ["RANK"], "local rank": os.environ["LOCAL_RANK"], "size": context.size}


def crash(context: Context) -> None:
    context.report(Figure("before the crash", 1.0))
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse(context: Context) -> None:
    raise ValueError("no room\nfor a model")


def fail_on_rank_1(context: Context) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 failed")
    time.sleep(3600)


def count(context: Context) -> Generator[int, None, None]:
    try:
        yield from range(10)
    finally:
        print("closed", flush=True)


def die_with_a_fork(context: Context) -> None:
    """Dies before a process that it forked, which holds its end of the pipe."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)

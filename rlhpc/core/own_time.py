"""CPU time that a process spends on observing itself, by the clocks of the threads that do it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

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

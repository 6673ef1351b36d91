"""Seconds that a process spends in each part of a conversion."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("read", "cast", "checksum", "write", "finish")
_spent: Counter[str] = Counter()  # of this process
_inner: list[float] = []  # seconds of the parts inside each open one


@contextmanager
def part(name: str) -> Iterator[None]:
    """Counts the block's time, without that of parts inside it."""
    began = time.perf_counter()
    _inner.append(0.0)
    try:
        yield
    finally:
        seconds = time.perf_counter() - began
        _spent[name] += seconds - _inner.pop()
        if _inner:
            _inner[-1] += seconds


def taken() -> dict[str, float]:
    """Seconds by part since the last call."""
    found = dict(_spent)
    _spent.clear()
    return found

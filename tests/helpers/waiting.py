"""Waiting in tests: until a condition holds, with a limit that a slow and busy machine does not reach."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds; on a quiet machine no condition takes a tenth of this


def until(
    condition: Callable[[], object],
    what: str = "",
    detail: Callable[[], str] = str,
    *,
    seconds: float = PATIENCE,
    interval: float = 0.02,
) -> None:
    """Poll until ``condition()`` is true; AssertionError naming ``what``, with ``detail()``, after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what or 'a condition'}\n{detail()}")
        time.sleep(interval)

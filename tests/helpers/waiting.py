"""Waits in tests for conditions, with a limit that even a slow and busy machine does not reach."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds; ten times what any condition takes on a quiet machine


def until(
    condition: Callable[[], object],
    what: str = "",
    detail: Callable[[], str] = str,
    *,
    seconds: float = PATIENCE,
    interval: float = 0.02,
) -> None:
    """Poll until ``condition()`` is true; after ``seconds``, raise AssertionError with ``what`` and ``detail()``.

    A condition that takes long, such as a command, is polled less often, for a fifth of the time at most.
    """
    began = time.monotonic()
    deadline = began + seconds
    while not condition():
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what or 'a condition'}\n{detail()}")
        time.sleep(max(interval, 4 * (now - began)))
        began = time.monotonic()

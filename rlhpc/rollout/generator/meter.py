"""Activity and waiting times of an engine, in real time."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from rlhpc.core.heartbeat import enter
from rlhpc.rollout.generator.messages import Activity


class ActivityMeter:
    """Counts tokens and steps of an engine, and its seconds by what it waits for, from one ``take`` to the next."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._idle: Counter[str] = Counter()
        self._tokens = self._steps = 0

    @contextlib.contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Counts a wait. The heartbeat shows what for, and no progress: a wait without end is a hang."""
        enter(f"waiting for {what}")
        began = time.perf_counter()
        try:
            yield
        finally:
            self._idle[what] += time.perf_counter() - began  # type: ignore[assignment]

    @contextlib.contextmanager
    def scores(self) -> Iterator[None]:
        """Counts the time in which models beside the engine score groups, and it makes no step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._idle["models"] += time.perf_counter() - began  # type: ignore[assignment]

    def stepped(self, tokens: int) -> None:
        """Counts an engine step and the tokens that it sampled."""
        self._steps += 1
        self._tokens += tokens

    def take(self, statistics: Mapping[str, float]) -> Activity:
        """All since the last call."""
        now = time.perf_counter()
        found = Activity(now - self._began, dict(self._idle), self._tokens, self._steps, dict(statistics))
        self._began, self._idle = now, Counter()
        self._tokens = self._steps = 0
        return found

"""Engines that hold up the trainers: they have the groups for which the next step waits, and others do not."""

from __future__ import annotations

from collections.abc import Collection

MOST_SECONDS = 1.0  # that one look counts: the trainers may do other things between two


class Laggards:
    """Measures how long the trainers wait for each engine, in one step and in all since the last metrics."""

    def __init__(self, limit: float | None) -> None:
        """``limit``: seconds in one step after which an engine counts as lost; None: never."""
        self._limit = limit
        self._looked: float | None = None
        self._step: dict[int, float] = {}
        self._waited: dict[int, float] = {}

    def look(self, holding: Collection[int], present: Collection[int], now: float) -> list[int]:
        """Counts the time since the last look for the engines that hold the step up, unless all do; returns those that
        have done so for too long."""
        passed = min(now - self._looked, MOST_SECONDS) if self._looked is not None else 0.0
        self._looked = now
        if not holding or {*holding} >= {*present}:
            return []
        for engine in holding:
            self._step[engine] = self._step.get(engine, 0.0) + passed
            self._waited[engine] = self._waited.get(engine, 0.0) + passed
        if self._limit is None:
            return []
        return sorted(engine for engine in holding if self._step[engine] > self._limit)

    def forget(self, engine: int) -> None:
        """An engine is lost: when it is back, its time counts from the beginning."""
        self._step.pop(engine, None)

    def begin_step(self) -> None:
        """The trainers have a batch, and wait for the next one later."""
        self._looked, self._step = None, {}

    def take(self) -> tuple[int, float] | None:
        """The engine for which the trainers have waited longest since the last call, and for how many seconds."""
        waited, self._waited = self._waited, {}
        return max(waited.items(), key=lambda item: item[1]) if waited else None

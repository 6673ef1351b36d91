"""For how long engines of rollout jobs were not there: their nodes were not the run's."""

from __future__ import annotations

from collections.abc import Collection


class Absences:
    """Seconds of absent engines. ``engines``: those of rollout jobs, all absent ``since`` a Unix time."""

    def __init__(self, engines: range, since: float) -> None:
        self._engines, self._looked, self._seconds = engines, since, 0.0

    def look(self, present: Collection[int], now: float) -> None:
        """Counts until ``now``, in which so many were there. Called before that changes."""
        absent = sum(engine not in present for engine in self._engines)
        self._seconds += absent * max(0.0, now - self._looked)
        self._looked = now

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

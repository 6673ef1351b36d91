"""The newest values of a metric: those of a number of steps and of minutes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

_PARTS = 64  # into which a long window is divided; a part has the mean of its values


@dataclass(frozen=True)
class Window:
    """The newest steps: at least ``steps`` of them, over at least ``minutes``."""

    steps: int = 1
    minutes: float = 0.0

    def __str__(self) -> str:
        """For messages: "step", "5 steps", "10 steps and 10 minutes"."""
        steps = "step" if self.steps == 1 else f"{self.steps} steps"
        return f"{steps} and {self.minutes:g} minutes" if self.minutes else steps


@dataclass
class _Part:
    begin: float
    steps: int
    total: float


class WindowValues:
    """WindowValues within a window, and up to ``before`` of those that have left it.

    Memory and time are bounded for windows of any length: a window of over 64 steps keeps means of consecutive values.
    """

    def __init__(self, window: Window, before: int = 0) -> None:
        self._window, self._parts = window, deque[_Part]()
        self._steps, self._seconds = 0, 60 * window.minutes
        self._part = (math.ceil(window.steps / _PARTS), self._seconds / _PARTS)
        self._before: deque[float] = deque(maxlen=before)
        self._now = -math.inf

    def add(self, time: float, value: float) -> None:
        """Adds the next value. Clocks that go back count as standing."""
        self._now = time = max(time, self._now)
        last = self._parts[-1] if self._parts else None
        if last is not None and (last.steps < self._part[0] or time - last.begin < self._part[1]):
            last.steps, last.total = last.steps + 1, last.total + value
        else:
            self._parts.append(_Part(time, 1, value))
        self._steps += 1
        while len(self._parts) > 1 and self._suffices(self._steps - self._parts[0].steps, self._parts[1].begin):
            first = self._parts.popleft()
            self._steps -= first.steps
            self._before.append(first.total / first.steps)

    @property
    def full(self) -> bool:
        """Whether the values cover the window."""
        return bool(self._parts) and self._suffices(self._steps, self._parts[0].begin)

    @property
    def median(self) -> float:
        """Median of the values in the window."""
        return statistics.median(part.total / part.steps for part in self._parts)

    @property
    def before(self) -> deque[float]:
        """WindowValues that have left the window, oldest first."""
        return self._before

    def _suffices(self, steps: int, begin: float) -> bool:
        return steps >= self._window.steps and self._now - begin >= self._seconds

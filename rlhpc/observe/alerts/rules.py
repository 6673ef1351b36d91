"""Rules of alerts: limits on metrics, functions of a record, and the engine that checks them.

A rule fires once per episode.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhpc.config.observe import AlertAction, AlertRuleSection
from rlhpc.core.records import number

Severity = Literal["info", "warning", "error"]
Record = Mapping[str, Any]  # the metrics of a step, with phase, step and time

_BASELINE, _LEAST_BASELINE = 256, 10  # values before the window that "of median" is of; fewest of them
_CHANGES = 256  # from one step to the next, whose median is the typical one


@dataclass(frozen=True)
class Window:
    """The newest steps: at least ``steps`` of them, over at least ``minutes``."""

    steps: int = 1
    minutes: float = 0.0

    def __str__(self) -> str:
        """For messages: "step", "5 steps", "10 steps and 10 minutes"."""
        steps = "step" if self.steps == 1 else f"{self.steps} steps"
        return f"{steps} and {self.minutes:g} minutes" if self.minutes else steps

    def covered(self, steps: int, seconds: float) -> bool:
        """True if so many steps over so many seconds are the window."""
        return steps >= self.steps and seconds >= 60 * self.minutes


class WindowValues:
    """Values within a window, and up to ``before`` of those that have left it."""

    def __init__(self, window: Window, before: int = 0) -> None:
        self._window, self._now = window, -math.inf
        self._newest: deque[tuple[float, float]] = deque()  # time and value
        self._sorted: list[float] = []
        self.before: deque[float] = deque(maxlen=before)  # oldest first

    def add(self, time: float, value: float) -> None:
        """Adds the next value. Clocks that go back count as standing."""
        self._now = max(time, self._now)
        self._newest.append((self._now, value))
        insort(self._sorted, value)
        while len(self._newest) > 1 and self._covered(1):
            _, value = self._newest.popleft()
            del self._sorted[bisect_left(self._sorted, value)]
            self.before.append(value)

    @property
    def median(self) -> float | None:
        """Median of the values; None before they cover the window."""
        count = len(self._sorted)
        return (self._sorted[(count - 1) // 2] + self._sorted[count // 2]) / 2 if self._covered(0) else None

    def _covered(self, first: int) -> bool:
        """True if the values from the given place on cover the window."""
        return self._window.covered(len(self._newest) - first, self._now - self._newest[first][0])


class Limit:
    """Checks the median of a metric by a row. ``changes``: number of typical changes from one step to the next that it
    must also be away from its reference."""

    def __init__(self, row: AlertRuleSection, changes: float = 0.0) -> None:
        self._row, self._window, self._least = row, Window(row.steps, row.minutes), changes
        self._values = WindowValues(self._window, _BASELINE if row.of == "median" else 0)
        self._changes: deque[float] = deque(maxlen=_CHANGES if changes else 0)
        self._last, self._reference = math.nan, math.nan

    def add(self, record: Record) -> str | None:
        """Takes the next record of a phase. Returns the alert's message if the condition holds, "" if not, None if it
        cannot be checked: the metric is absent, or the window not full."""
        value = number(record.get(self._row.metric))
        if value is None or math.isnan(value) or (self._row.of and math.isinf(value)):
            return None
        if not math.isnan(self._last):
            self._changes.append(abs(value - self._last))
        self._last = value
        self._values.add(record["time"], value)
        median = self._values.median
        if median is None or not self._refer(median):
            return None
        return self._message(median) if self._holds(median) else ""

    def _refer(self, median: float) -> bool:
        """Updates the value that the limit is a share of. Returns whether there is one, or none is needed."""
        before = self._values.before
        match self._row.of:
            case "median":
                self._reference = statistics.median(before) if len(before) >= _LEAST_BASELINE else math.nan
            case "best" if not math.isnan(self._reference):
                self._reference = (max if self._row.above is None else min)(self._reference, median)
            case _ if math.isnan(self._reference):
                self._reference = median
        return not math.isnan(self._reference)

    def _holds(self, median: float) -> bool:
        """True if the median is beyond the limit. A share of a negative reference is as far from it as that of its
        amount: below 0.7 of a best of -1 is below -1.3."""
        row, reference = self._row, self._reference
        share = row.below if row.above is None else row.above
        assert share is not None  # rules_of
        limit = reference + (share - 1) * abs(reference) if row.of else share
        if not (median < limit if row.above is None else median > limit):
            return False
        return not self._changes or abs(median - reference) > self._least * statistics.median(self._changes)

    def _message(self, median: float) -> str:
        of = f" ({self._reference:.4g})" if self._row.of else ""
        return f"{self._row.metric} is {median:.4g} in the last {self._window}: {condition(self._row)}{of}"


def condition(row: AlertRuleSection) -> str:
    """Limit of a row for messages, such as "below 0.7 of best"."""
    limit = f"below {row.below:g}" if row.above is None else f"above {row.above:g}"
    return f"{limit} of {row.of}" if row.of else limit


class Lasting:
    """Checks whether a function returns the same message for all records of a window. It returns "" where all is well,
    None where it cannot know."""

    def __init__(self, function: Callable[[Record], str | None], window: Window) -> None:
        self._function, self._window = function, window
        self._message, self._steps, self._since = "", 0, 0.0

    def add(self, record: Record) -> str | None:
        """Takes the next record, as ``Limit.add``."""
        message = self._function(record)
        if message is None:
            return None
        if message != self._message:
            self._message, self._steps, self._since = message, 0, record["time"]
        self._steps += 1
        return message if self._window.covered(self._steps, record["time"] - self._since) else ""


@dataclass(frozen=True)
class Rule:
    """``detector`` makes a detector for a phase of a run; ``window``: how long the condition must be false before the
    rule can fire again; ``text``: when it fires, for docs/watch.md."""

    name: str
    detector: Callable[[], Limit | Lasting]
    window: Window
    severity: Severity = "warning"
    action: AlertAction = "warn"
    text: str = ""


class Engine:
    """Checks the records of a run in their order.

    A rule that has fired is quiet until its condition has been false for its window. ``past``: records of earlier
    attempts, which fire nothing but are what later ones are compared with.
    """

    def __init__(self, rules: Sequence[Rule], past: Iterable[Record] = ()) -> None:
        self._rules, self._phase = rules, ""
        self._episodes: list[_Episode] = []
        for record in past:
            self.add(record)

    def add(self, record: Record) -> list[tuple[Rule, str]]:
        """The rules that fire at the next record, with their messages. It has its ``phase``, ``step`` and ``time``."""
        if record["phase"] != self._phase:
            self._phase = record["phase"]
            self._episodes = [_Episode(rule) for rule in self._rules]
        found = [(episode.rule, episode.add(record)) for episode in self._episodes]
        return [(rule, message) for rule, message in found if message]


class _Episode:
    """State of a rule in a phase."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self._detector = rule, rule.detector()
        self._on, self._false, self._since = False, 0, math.inf

    def add(self, record: Record) -> str:
        """The message if the rule fires now."""
        message = self._detector.add(record)
        if message is None:
            return ""
        if message:
            begins, self._on, self._false = not self._on, True, 0
            return message if begins else ""
        if self._on:
            self._since = record["time"] if not self._false else self._since
            self._false += 1
            self._on = not self.rule.window.covered(self._false, record["time"] - self._since)
        return ""

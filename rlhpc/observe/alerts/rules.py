"""Rules of alerts: conditions and windows, detectors of a step's record, and the engine that evaluates them.

A rule fires once per episode.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from rlhpc.core.errors import UserError
from rlhpc.core.records import number

Reference = Literal["", "best", "first", "median"]
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_FORM = re.compile(
    r"\s*(?P<compare>[<>]=?)\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?:\s+of\s+(?P<of>\w+))?\s*"
)
_REMEDY = 'write "> 0.5", "< 0.7 of best", of first or of median, or "non-finite"'


@dataclass(frozen=True)
class MetricCondition:
    """Comparison of a value with ``number``, or with that share of a reference; or whether it is not finite, with an
    empty ``compare``."""

    compare: str = ""
    number: float = 0.0
    of: Reference = ""

    def __str__(self) -> str:
        share = f" of {self.of}" if self.of else ""
        return f"{self.compare} {self.number:g}{share}" if self.compare else "non-finite"

    def limit(self, reference: float) -> float:
        """The value that is compared with. A share of a negative reference is as far from it as that of its amount:
        0.7 of -1 is -1.3, so that "< 0.7 of best" means 30% worse for rewards of any sign."""
        if not self.of:
            return self.number
        return reference + (self.number - 1) * abs(reference)

    def holds(self, value: float, reference: float = 0.0) -> bool:
        """True if the value fulfils the condition."""
        if not self.compare:
            return not math.isfinite(value)
        return _COMPARE[self.compare](value, self.limit(reference))

    @property
    def upwards(self) -> bool:
        """True if large values fulfil it."""
        return self.compare.startswith(">")


def parse_condition(text: str, where: str = "condition") -> MetricCondition:
    """MetricCondition of a rule in the configuration. Raises UserError if it is none."""
    if text.strip().replace("_", "-") == "non-finite":
        return MetricCondition()
    match = _FORM.fullmatch(text)
    if match is None:
        raise UserError(f"{text[:80]!r} is not a condition", where=where, remedy=_REMEDY)
    of, number = match["of"] or "", float(match["number"])
    if of not in get_args(Reference):
        raise UserError(f"{of[:80]!r} is not a reference of conditions", where=where, remedy=_REMEDY)
    if not math.isfinite(number):
        raise UserError(f"{match['number']!r} is too large", where=where, remedy=_REMEDY)
    return MetricCondition(match["compare"], number, of)  # type: ignore[arg-type]


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
        """True if the values cover the window."""
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


Severity = Literal["info", "warning", "error"]
Action = Literal["warn", "save", "stop"]
Record = Mapping[str, Any]  # the metrics of a step, with phase, step and time

_BASELINE, _LEAST_BASELINE = 256, 10  # values before the window that "of median" is of; fewest of them


class Detector(Protocol):
    """Checks one phase of a run. It has state: a new one is made for each phase."""

    def add(self, record: Record) -> str | None:
        """Takes the next record. Returns the alert's message if the condition holds, "" if not, None if it cannot be
        checked: the metric is absent, or the window not full."""


@dataclass(frozen=True)
class Rule:
    """``detector`` makes a detector for a phase of a run; ``window``: also how long the condition must be false before
    the rule can fire again."""

    name: str
    detector: Callable[[], Detector]
    window: Window
    severity: Severity = "warning"
    action: Action = "warn"
    command: str | None = None
    webhook: str | None = None


class Threshold:
    """Checks the median of a metric in a window by a condition."""

    def __init__(self, metric: str, condition: MetricCondition, window: Window) -> None:
        self._metric, self._condition, self._window = metric, condition, window
        self._values = WindowValues(window, _BASELINE if condition.of == "median" else 0)
        self._reference: float | None = None

    def add(self, record: Record) -> str | None:
        value = number(record.get(self._metric))
        if value is None:
            return None
        if not self._condition.compare:
            return f"{self._metric} is {value}" if self._condition.holds(value) else ""
        if math.isnan(value):  # of no order
            return None
        self._values.add(record["time"], value)
        if not self._values.full:
            return None
        median = self._values.median
        reference = self._refer(median)
        if reference is None:
            return None
        return self._message(median, reference) if self._condition.holds(median, reference) else ""

    def _refer(self, median: float) -> float | None:
        """The present value of what the condition refers to; None before there is one."""
        match self._condition.of:
            case "best":
                choose = min if self._condition.upwards else max
                self._reference = median if self._reference is None else choose(self._reference, median)
            case "first":
                self._reference = median if self._reference is None else self._reference
            case "median":
                before = self._values.before
                self._reference = statistics.median(before) if len(before) >= _LEAST_BASELINE else None
            case _:
                return 0.0
        return self._reference

    def _message(self, median: float, reference: float) -> str:
        of = f" ({reference:.4g})" if self._condition.of else ""
        return f"{self._metric} is {median:.4g} in the last {self._window}: {self._condition}{of}"


class Collapse:
    """Checks whether a metric has fallen below a share of its best. The fall must also exceed several typical changes
    from one step to the next: rewards near 0 vary by more than their mean."""

    CHANGES = 6.0
    _RECENT = 256  # changes whose median is the typical one

    def __init__(self, metric: str, share: float, window: Window) -> None:
        self._metric, self._condition, self._window = metric, MetricCondition("<", share, "best"), window
        self._values, self._best = WindowValues(window), -math.inf
        self._last: float | None = None
        self._changes: deque[float] = deque(maxlen=self._RECENT)

    def add(self, record: Record) -> str | None:
        value = number(record.get(self._metric))
        if value is None or not math.isfinite(value):
            return None
        if self._last is not None:
            self._changes.append(abs(value - self._last))
        self._last = value
        self._values.add(record["time"], value)
        if not self._values.full:
            return None
        median = self._values.median
        self._best = max(self._best, median)
        typical = statistics.median(self._changes) if self._changes else 0.0
        if not self._condition.holds(median, self._best) or self._best - median <= self.CHANGES * typical:
            return ""
        return (
            f"{self._metric} is {median:.4g} in the last {self._window}: "
            f"below {self._condition.number:g} of its best, {self._best:.4g}"
        )


@dataclass(frozen=True)
class Fired:
    """A rule whose condition has begun to hold."""

    rule: Rule
    message: str


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

    def add(self, record: Record) -> list[Fired]:
        """The rules that fire at the next record, which has its ``phase``, ``step`` and ``time``."""
        if record["phase"] != self._phase:
            self._phase = record["phase"]
            self._episodes = [_Episode(rule) for rule in self._rules]
        found = [(episode.rule, episode.add(record)) for episode in self._episodes]
        return [Fired(rule, message) for rule, message in found if message]


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
            window, seconds = self.rule.window, record["time"] - self._since
            self._on = self._false < window.steps or seconds < 60 * window.minutes
        return ""

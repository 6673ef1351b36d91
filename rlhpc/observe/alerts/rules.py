"""What a rule is: a detector of each step's record, a window, an action."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhpc.core.records import number
from rlhpc.observe.alerts.condition import MetricCondition
from rlhpc.observe.alerts.window import Window, WindowValues

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

"""Curves of metrics, thinned to the least and greatest value of each bin."""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.core.records import is_step, number
from rlhpc.core.storage import patiently
from rlhpc.observe.page.packing import Numbers

MOST_BINS, LEAST_BINS = 500, 50
MOST_CURVES = 400  # of a run
_CURVES_AT_MOST_BINS = 150  # with more curves on the page, all have fewer bins
_OWN = frozenset(("phase", "step", "total_steps", "time"))
_LARGEST = 3e38  # of float32


@dataclass
class Column:
    """Values of a metric and the steps that they belong to."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))

    def finite(self) -> list[float]:
        return [value for value in self.values if abs(value) < _LARGEST]


@dataclass
class Steps:
    """Metrics of a run: columns by phase and name, and the times of its steps. ``totals``: steps of each phase."""

    columns: dict[tuple[str, str], Column] = field(default_factory=dict)
    times: dict[str, Column] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """Time of the first record; 0 without any."""
        return min((column.values[0] for column in self.times.values()), default=0.0)

    def column(self, name: str, phase: str = "rl") -> list[float]:
        """Finite values of a metric."""
        found = self.columns.get((phase, name))
        return found.finite() if found else []


def read_steps(path: Path) -> Steps:
    """Columns of metrics.jsonl; empty if it is absent. Reads line by line: the file of a long run is large."""
    steps = Steps()
    with contextlib.suppress(FileNotFoundError):
        patiently(lambda: _read(path, steps), path)
    return steps


def _read(path: Path, steps: Steps) -> None:
    steps.columns.clear()
    steps.times.clear()
    with open(path, "rb") as file:
        for record in _records(file):
            _add(steps, record)


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and is_step(record):
            yield record


def _add(steps: Steps, record: dict[str, Any]) -> None:
    phase, step = record["phase"], record["step"]
    if not -1 < step < 1 << 24:  # float32 is exact up to there
        return
    for name in record:
        value = number(record[name]) if name not in _OWN else None
        if value is not None:
            _append(steps.columns.setdefault((phase, name), Column()), step, value)
    moment = number(record.get("time"))
    if moment is not None and math.isfinite(moment):
        _append(steps.times.setdefault(phase, Column()), step, moment)
    if type(record.get("total_steps")) is int:
        steps.totals[phase] = record["total_steps"]


def _append(column: Column, step: int, value: float) -> None:
    while column.steps and column.steps[-1] >= step:  # a step that is repeated replaces those from it on
        column.steps.pop()
        column.values.pop()
    column.steps.append(step)
    column.values.append(value)


def bins_for(curves: int) -> int:
    """Number of bins of each curve, so that many curves do not make a large page."""
    return max(LEAST_BINS, min(MOST_BINS, MOST_BINS * _CURVES_AT_MOST_BINS // max(1, curves)))


def pack_curves(steps: Steps, numbers: Numbers, bins: int) -> list[dict[str, Any]]:
    """Curves of a run, by phase and name, for the page's scripts."""
    names = sorted(steps.columns)[:MOST_CURVES]
    return [
        {"phase": phase, "name": name, **_packed(steps.columns[phase, name], numbers, bins)} for phase, name in names
    ]


def pack_times(steps: Steps, numbers: Numbers, bins: int) -> dict[str, Any]:
    """Hours since the first record by phase, as curves over the step."""
    began = steps.began
    found = {}
    for phase, column in steps.times.items():
        hours = Column(column.steps, array("d", ((value - began) / 3600 for value in column.values)))
        found[phase] = _packed(hours, numbers, bins)
    return found


def _packed(column: Column, numbers: Numbers, bins: int) -> dict[str, Any]:
    """Places of a curve's points. ``x``: differences of steps, ``y``: values.

    A thinned curve also has ``mx`` and ``my``, the middle step and mean of each bin, which smoothing takes, and
    ``each``, the number of steps in a bin. ``bad``: number of values that are not finite.
    """
    steps, values = column.steps, column.values
    kept, middles, means = thinned(values, bins)
    places = [steps[index] for index in kept]
    found: dict[str, Any] = {
        "x": numbers.put(_differences(places)),
        "y": numbers.put(values[index] for index in kept),
    }
    if means:
        found["mx"] = numbers.put(_differences([steps[index] for index in middles]))
        found["my"] = numbers.put(means)
        found["each"] = len(values) / bins
    bad = sum(1 for value in values if not abs(value) < _LARGEST)
    return {**found, "bad": bad} if bad else found


def thinned(values: array, bins: int) -> tuple[list[int], list[int], list[float]]:
    """Indices of the least and greatest finite value of each bin, and each bin's middle index and mean.

    Up to two values a bin, all finite values are kept, and there are no means.
    """
    count = len(values)
    if count <= 2 * bins:
        return [index for index, value in enumerate(values) if abs(value) < _LARGEST], [], []
    kept, middles, means = [], [], []
    for number_of_bin in range(bins):
        begin, end = number_of_bin * count // bins, (number_of_bin + 1) * count // bins
        inside = values[begin:end]
        finite = [value for value in inside if abs(value) < _LARGEST]
        if not finite:
            continue
        kept += sorted({begin + inside.index(min(finite)), begin + inside.index(max(finite))})
        middles.append((begin + end - 1) // 2)
        means.append(math.fsum(finite) / len(finite))
    return kept, middles, means


def _differences(places: list[float]) -> Iterator[float]:
    """The first place, then the distance of each from the one before: they compress better."""
    before = 0.0
    for place in places:
        yield place - before
        before = place

"""Numbers of the page: curves, thinned to the extremes of each bin, histograms, and bars of each rank's phases.

All of them are one gzip stream of float32, and the page's texts another one, both as base64.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.core.histograms import NAMES, Histogram, StepHistograms, read_histograms
from rlhpc.core.records import PHASES, MetricsFile, Record, number
from rlhpc.core.spans import Span, StepTimeline, newest_timelines

_LEVEL = 6
Place = list[int]  # first number and count


class Numbers:
    """All numbers of the page as float32. Equal sequences are kept once."""

    def __init__(self) -> None:
        self.data = array("f")
        self._places: dict[bytes, Place] = {}

    def put(self, values: Iterable[float]) -> Place:
        """Adds numbers; returns their place for the page's scripts."""
        added = array("f", values)
        key = added.tobytes()
        if key not in self._places:
            self._places[key] = [len(self.data), len(added)]
            self.data.extend(added)
        return self._places[key]

    def __len__(self) -> int:
        return len(self.data)

    def packed(self) -> str:
        """One gzip stream: the first bytes of all numbers, then the second ones and so on, which compresses best."""
        data = self.data
        if sys.byteorder == "big":
            data = data[:]
            data.byteswap()
        raw = data.tobytes()
        return _compressed(b"".join(raw[plane::4] for plane in range(4)))


def pack_texts(value: Any) -> str:
    """A JSON document as one gzip stream; null in place of numbers that JSON lacks."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"))
    return _compressed(text.encode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _compressed(raw: bytes) -> str:
    return base64.b64encode(gzip.compress(raw, _LEVEL, mtime=0)).decode("ascii")


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

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

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
    """Columns of metrics.jsonl; empty if it is absent. Keeps no records: the file of a long run is large."""
    steps = Steps()
    for record in MetricsFile(path).newest():
        _add(steps, record)
    for column in (*steps.columns.values(), *steps.times.values()):
        column.steps.reverse()
        column.values.reverse()
    times, totals = ({phase: each[phase] for phase in PHASES if phase in each} for each in (steps.times, steps.totals))
    return Steps(steps.columns, times, totals)


def _add(steps: Steps, record: Record) -> None:
    """Adds the step before those added."""
    phase, step = record["phase"], record["step"]
    if step >= 1 << 24:  # float32 is exact up to there
        return
    for name in record:
        value = number(record[name]) if name not in _OWN else None
        if value is not None:
            steps.columns.setdefault((phase, name), Column()).add(step, value)
    moment = number(record.get("time"))
    if moment is not None and math.isfinite(moment):
        steps.times.setdefault(phase, Column()).add(step, moment)
    if type(record.get("total_steps")) is int:
        steps.totals.setdefault(phase, record["total_steps"])


def bins_for(curves: int) -> int:
    """Number of bins of each curve, so that many curves do not make a large page."""
    return max(LEAST_BINS, min(MOST_BINS, MOST_BINS * _CURVES_AT_MOST_BINS // max(1, curves)))


def pack_curves(steps: Steps, numbers: Numbers, bins: int) -> list[dict[str, Any]]:
    """Curves of a run, by phase and name, for the page's scripts."""
    names = sorted(steps.columns)[:MOST_CURVES]
    return [
        {"phase": phase, "name": name, **_curve(steps.columns[phase, name], numbers, bins)} for phase, name in names
    ]


def pack_times(steps: Steps, numbers: Numbers, bins: int) -> dict[str, Any]:
    """Hours since the first record by phase, as curves over the step."""
    began = steps.began
    found = {}
    for phase, column in steps.times.items():
        hours = Column(column.steps, array("d", ((value - began) / 3600 for value in column.values)))
        found[phase] = _curve(hours, numbers, bins)
    return found


def _curve(column: Column, numbers: Numbers, bins: int) -> dict[str, Any]:
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


DRAWN_BINS = 100  # of a histogram that is drawn
T = TypeVar("T")


def pack_distributions(path: Path, numbers: Numbers, most_steps: int) -> dict[str, Any] | None:
    """Histograms of at most ``most_steps`` steps of histograms.jsonl, evenly spread; None without any."""
    steps = spread([step for step in read_histograms(path) if any(map(step.histograms.get, NAMES))], most_steps)
    if not steps:
        return None
    packed = [_histogram(name, steps, numbers) for name in NAMES if any(name in step.histograms for step in steps)]
    return {"steps": numbers.put(step.step for step in steps), "histograms": packed}


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` (from 2 on) of the items at even distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _histogram(name: str, steps: Sequence[StepHistograms], numbers: Numbers) -> dict[str, Any]:
    """Places of a quantity's columns, with a number for each step, and of the counts of all steps' bins.

    ``bins`` is 0 for a step without a histogram, or with one of another scale than the last one's. ``lows`` and
    ``highs`` are as in the file: logarithms if ``log``.
    """
    found = [step.histograms.get(name) for step in steps]
    scale = next(one.scale for one in reversed(found) if one is not None)
    drawn = [one if one and one.scale == scale and len(one.counts) <= DRAWN_BINS else _NONE for one in found]
    return {
        "name": name,
        "log": scale == "log10",
        "lows": numbers.put(one.low for one in drawn),
        "highs": numbers.put(one.high for one in drawn),
        "values": numbers.put(one.values for one in drawn),
        "bins": numbers.put(len(one.counts) for one in drawn),
        "counts": numbers.put(count for one in drawn for count in one.counts),
    }


_NONE = Histogram(0.0, 0.0, (), 0)


_UNITS = 20_000  # in a step


def pack_timeline(path: Path, numbers: Numbers, most_spans: int) -> dict[str, Any] | None:
    """Newest steps of timeline.jsonl with at most ``most_spans`` spans together, but the last one; None without any."""
    steps: list[dict[str, Any]] = []
    phases: dict[str, int] = {}
    left = most_spans
    for timeline in newest_timelines(path):
        ranks = [_in_order(spans) for spans in timeline.ranks]
        left -= sum(map(len, ranks))
        if steps and left < 0:
            break
        steps.append(_step(timeline, ranks, phases, numbers))
    return {"phases": list(phases), "steps": steps[::-1]} if steps else None


def _in_order(spans: Sequence[Span]) -> list[Span]:
    """Spans in the order in which they are drawn, one inside another after it, without impossible ones."""
    possible = [span for span in spans if 0 <= span.begin <= span.end < 1e9]
    return sorted(possible, key=lambda span: (span.begin, -span.end))


def _step(timeline: StepTimeline, ranks: list[list[Span]], phases: dict[str, int], numbers: Numbers) -> dict[str, Any]:
    """Places of a step's spans: columns for all ranks, and the number of spans of each rank.

    ``gaps``, ``lasts`` and ``waits``: time since the end of the rank's span before, duration and waiting, in units of
    ``unit`` seconds. Whole numbers compress best, and a unit is a small part of the step.
    """
    spans = [span for rank in ranks for span in rank]
    unit = max((span.end for span in spans), default=0.0) / _UNITS or 1.0
    gaps, lasts = [], []
    for rank in ranks:
        before = 0
        for span in rank:
            begin, end = round(span.begin / unit), round(span.end / unit)
            gaps.append(begin - before)
            lasts.append(end - begin)
            before = end
    return {
        "phase": timeline.phase,
        "step": timeline.step,
        "unit": unit,
        "counts": numbers.put(len(rank) for rank in ranks),
        "kinds": numbers.put(phases.setdefault(span.phase, len(phases)) for span in spans),
        "gaps": numbers.put(gaps),
        "lasts": numbers.put(lasts),
        "waits": numbers.put(round((span.end - span.begin - span.busy) / unit) for span in spans),
    }

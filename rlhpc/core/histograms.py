"""Histograms of RL steps: one line of histograms.jsonl for a step, read without numpy.

    {"phase": "rl", "step": 7, "time": 1766000000.0, "histograms": {
        "reward": {"low": 0.0, "high": 1.0, "counts": [3, 0, 5], "values": 8},
        "logprob_diff": {"low": -7.0, "high": 1.0, "counts": [4, 0, 9, 2], "values": 15, "scale": "log10"}}}

Bins are equally wide from ``low`` to ``high``. With ``scale`` log10 these bounds are logarithms: values below the first
bin, 0 included, count in the first one, values above the last bin in the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rlhpc.core.records import MetricsFile, Record, number

NAMES = ("response/length", "reward", "advantage", "logprob_diff")
# Of logprob_diff, in decades: the trainer adds up the counts of its ranks, which need the same bins.
DIFF_LOW, DIFF_HIGH, DIFF_BINS = -7.0, 1.0, 16
_MOST_BINS = 1000  # of a file that something else wrote


@dataclass(frozen=True)
class Histogram:
    """Distribution of a quantity over a step. ``values``: its number of values; the counts are of a share of them if
    there are very many."""

    low: float
    high: float
    counts: tuple[int, ...]
    values: int
    scale: Literal["linear", "log10"] = "linear"

    @property
    def edges(self) -> tuple[float, ...]:
        """Bounds of the bins, one more than bins, in the unit of the values."""
        width = (self.high - self.low) / len(self.counts)
        inner = [self.low + width * place for place in range(1, len(self.counts))]
        edges = (self.low, *inner, self.high)
        return tuple(10.0**edge for edge in edges) if self.scale == "log10" else edges

    @property
    def bins(self) -> tuple[tuple[float, float, int], ...]:
        """Lower bound, upper bound and count of each bin."""
        return tuple((*bounds, count) for bounds, count in zip(pairwise(self.edges), self.counts, strict=True))

    def to_json(self) -> dict[str, Any]:
        found = {"low": self.low, "high": self.high, "counts": list(self.counts), "values": self.values}
        return found if self.scale == "linear" else {**found, "scale": self.scale}


@dataclass(frozen=True)
class StepHistograms:
    """Histograms of one RL step by their names (``NAMES``). ``time``: of writing, since 1970."""

    step: int
    time: float
    histograms: Mapping[str, Histogram] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found = {name: histogram.to_json() for name, histogram in self.histograms.items()}
        return {"phase": "rl", "step": self.step, "time": self.time, "histograms": found}


def interval(total_steps: int, most: int) -> int:
    """Steps from one line to the next, so that ``total_steps`` steps make at most ``most`` lines; 0: no lines."""
    return -(-total_steps // most) if most else 0


def read_histograms(path: Path) -> list[StepHistograms]:
    """Histograms of a run, by step; none without the file. Skips malformed lines and histograms."""
    return histograms_of(MetricsFile(path).steps())


def histograms_of(steps: Iterable[Record]) -> list[StepHistograms]:
    """Histograms in the records of the file."""
    found = []
    for record in steps:
        time, histograms = number(record.get("time")), record.get("histograms")
        if time is not None and isinstance(histograms, dict):
            read = {name: _histogram(value) for name, value in histograms.items()}
            known = {name: value for name, value in read.items() if value is not None}
            found.append(StepHistograms(record["step"], time, known))
    return found


def _histogram(value: Any) -> Histogram | None:
    """The histogram; None if it is malformed."""
    if not isinstance(value, dict):
        return None
    low, high, scale = number(value.get("low")), number(value.get("high")), value.get("scale", "linear")
    limit = 300.0 if scale == "log10" else 1e300  # of finite edges
    if low is None or high is None or not -limit <= low < high <= limit or scale not in ("linear", "log10"):
        return None
    counts, values = value.get("counts"), value.get("values")
    if not isinstance(counts, list) or not isinstance(values, int) or not 0 < len(counts) <= _MOST_BINS:
        return None
    whole = all(type(count) is int and count >= 0 for count in (values, *counts))
    return Histogram(low, high, tuple(counts), values, scale) if whole else None


def diff_histogram(above: Sequence[float], values: float) -> Histogram | None:
    """Histogram of log-prob differences from the number of values above each inner edge; None without values."""
    if not values:
        return None
    counts = [round(more - less) for more, less in pairwise((values, *above, 0.0))]
    return Histogram(DIFF_LOW, DIFF_HIGH, tuple(counts), round(values), "log10")


def inner_diff_edges() -> tuple[float, ...]:
    """Inner edges of the histogram of log-prob differences, in nats."""
    return Histogram(DIFF_LOW, DIFF_HIGH, (0,) * DIFF_BINS, 0, "log10").edges[1:-1]

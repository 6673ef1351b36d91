"""Bins a step's values and appends them to histograms.jsonl."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from rlhpc.core.files import LineFile
from rlhpc.core.histograms import Histogram, StepHistograms, interval

BINS = 30
_MOST_VALUES = 100_000  # that are binned
_LARGEST = 1e300  # magnitude that is binned: the range of all values is finite
_NARROWEST = 1e-6  # range of all bins, over the values' magnitude


def binned(parts: Sequence[np.ndarray]) -> Histogram | None:
    """Histogram of the finite values of all parts; None without any. Of very many values, every n-th is binned."""
    total = sum(len(part) for part in parts)
    values = _every(parts, max(1, math.ceil(total / _MOST_VALUES)))
    values = values[np.abs(values) < _LARGEST]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    least = _NARROWEST * max(1.0, abs(low), abs(high))
    if high - low < least:  # as good as one value: the bins are around it
        low, high = low - least / 2, high + least / 2
    counts, _ = np.histogram(values, bins=BINS, range=(low, high))
    return Histogram(low, high, tuple(counts.tolist()), total)


def _every(parts: Sequence[np.ndarray], gap: int) -> np.ndarray:
    """Every ``gap``-th value of the parts joined end to end, without joining all of them."""
    taken, offset = [np.empty(0)], 0
    if gap == 1:
        taken += parts
    else:
        for part in parts:
            taken.append(part[offset::gap])
            offset = (offset - len(part)) % gap
    return np.concatenate(taken)


class HistogramWriter:
    """Appends the histograms of every n-th step, n such that all ``total_steps`` make at most ``most`` lines."""

    def __init__(self, file: LineFile, total_steps: int, most: int) -> None:
        self._file, self._interval = file, interval(total_steps, most)

    def is_due(self, step: int) -> bool:
        """Whether the step, from 1, is written."""
        return self._interval > 0 and (step - 1) % self._interval == 0

    def write(self, step: int, histograms: Mapping[str, Histogram | None]) -> None:
        """Appends those that have values; on disk when it returns."""
        known = {name: histogram for name, histogram in histograms.items() if histogram is not None}
        record = StepHistograms(step, time.time(), known).to_json()
        self._file.append(json.dumps(record, separators=(",", ":")) + "\n")

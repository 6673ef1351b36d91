"""Histograms of RL steps, for heat maps over the steps and bars of one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.core.histograms import NAMES, Histogram, StepHistograms, read_histograms
from rlhpc.observe.page.packing import Numbers

MOST_BINS = 100  # of a histogram that is drawn
T = TypeVar("T")


def pack_distributions(path: Path, numbers: Numbers, most_steps: int) -> dict[str, Any] | None:
    """Histograms of at most ``most_steps`` steps of histograms.jsonl, evenly spread; None without any."""
    steps = spread([step for step in read_histograms(path) if any(map(step.histograms.get, NAMES))], most_steps)
    if not steps:
        return None
    packed = [_packed(name, steps, numbers) for name in NAMES if any(name in step.histograms for step in steps)]
    return {"steps": numbers.put(step.step for step in steps), "histograms": packed}


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` (from 2 on) of the items at even distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _packed(name: str, steps: Sequence[StepHistograms], numbers: Numbers) -> dict[str, Any]:
    """Places of a quantity's columns, with a number for each step, and of the counts of all steps' bins.

    ``bins`` is 0 for a step without a histogram, or with one of another scale than the last one's. ``lows`` and
    ``highs`` are as in the file: logarithms if ``log``.
    """
    found = [step.histograms.get(name) for step in steps]
    scale = next(one.scale for one in reversed(found) if one is not None)
    drawn = [one if one and one.scale == scale and len(one.counts) <= MOST_BINS else _NONE for one in found]
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

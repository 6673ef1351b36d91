"""Spikes of the gradient norm: the norm above which an update is skipped, from the norms of the updates before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW = 64  # norms that the median is of
FEWEST = 10  # norms before the first update that may be skipped


def largest_norm(norms: Sequence[float], ratio: float | None) -> float:
    """``ratio`` times the median of the newest norms; infinite without a ratio, or while there are too few norms."""
    if ratio is None or len(norms) < FEWEST:
        return math.inf
    return ratio * statistics.median(norms)


def with_norm(norms: Sequence[float], norm: float) -> list[float]:
    """The newest norms with another one, unless it is infinite, NaN or 0: updates without any advantage have norm 0."""
    known = [*norms, norm] if math.isfinite(norm) and norm > 0 else [*norms]
    return known[-WINDOW:]

"""Paired comparison of two configurations by one number of each run, with runs of equal seeds as pairs. Pure.

The number of a run is a single observation: values of one run's steps depend on each other, and counted as samples they
find a difference in half of all comparisons of equal configurations. With few pairs, the paired t test keeps its level
where percentile bootstraps do not, and a test by sign flips cannot reach 5% below six.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

FEWEST_PAIRS = 3  # with fewer, no p value
MOST_SEEDS = 1000  # that are tried to find a number


@dataclass(frozen=True)
class Paired:
    """Second minus first: mean of the pairs' differences, their standard deviation, the spread of runs with different
    seeds, and the two-sided p value of the paired t test. With fewer than three pairs, no p value."""

    pairs: int
    difference: float
    deviation: float
    spread: float
    p: float | None

    @property
    def effect(self) -> float | None:
        """The difference in spreads from seed to seed; None if seeds make no difference."""
        return self.difference / self.spread if self.spread else None

    @property
    def t(self) -> float:
        """The test's statistic; infinite if all pairs differ by the same."""
        if not self.deviation:
            return math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference / self.deviation * math.sqrt(self.pairs)

    def interval(self, level: float) -> tuple[float, float]:
        """The interval for the true difference that misses it in a share ``level`` of all comparisons."""
        half = critical(self.pairs, level) * self.deviation / math.sqrt(self.pairs)
        return self.difference - half, self.difference + half


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Compares runs of equal seeds, in the same order. Needs a pair."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    pairs = len(differences)
    if pairs < 2:
        return Paired(pairs, differences[0], 0.0, 0.0, None)
    spread = math.sqrt((stdev(first) ** 2 + stdev(second) ** 2) / 2)
    found = Paired(pairs, fmean(differences), stdev(differences), spread, None)
    if pairs < FEWEST_PAIRS:
        return found
    return Paired(pairs, found.difference, found.deviation, spread, _p_value(found.t, pairs))


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm 1979): one below the level is a finding, with at most that risk of any
    false one among all."""
    ordered, corrected, largest = sorted(range(len(values)), key=values.__getitem__), [0.0] * len(values), 0.0
    for place, index in enumerate(ordered):
        largest = max(largest, min(1.0, values[index] * (len(values) - place)))
        corrected[index] = largest
    return corrected


def power(effect: float, pairs: int, level: float) -> float:
    """Probability that a difference of ``effect`` standard deviations of the pairs' differences is found."""
    from scipy.stats import nct

    limit, shift = critical(pairs, level), abs(effect) * math.sqrt(pairs)
    above, below = float(nct.sf(limit, pairs - 1, shift)), float(nct.cdf(-limit, pairs - 1, shift))
    return above + (below if math.isfinite(below) else 0.0)


def seeds_needed(found: Paired, level: float, wanted: float = 0.8) -> int | None:
    """Pairs with which a difference as large as the one found is decided in a share ``wanted`` of all comparisons; None
    if that takes too many, or if all pairs differ by the same."""
    if not found.deviation or not found.difference:
        return None
    effect = found.difference / found.deviation
    if power(effect, MOST_SEEDS, level) < wanted:
        return None
    low, high = 2, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, level) >= wanted else (middle, high)
    return high


@lru_cache(1024)
def critical(pairs: int, level: float) -> float:
    """Value that the statistic's magnitude exceeds in a share ``level`` of comparisons of equal configurations."""
    from scipy.stats import t

    return float(t.isf(level / 2, pairs - 1))


def _p_value(statistic: float, pairs: int) -> float:
    from scipy.stats import t

    return float(2 * t.sf(abs(statistic), pairs - 1))

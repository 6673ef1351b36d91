"""The comparison's errors are as rare as it says, and its chance to find a difference is the predicted one."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from rlhpc.launch.studies.paired import Paired, holm, paired, power, seeds_needed

LEVEL, COMPARISONS = 0.05, 2000
STEPS, LAST, RHO = 120, 20, 0.95


def numbers(count: int, chance: np.random.Generator) -> np.ndarray:
    """One number for each of ``count`` runs: the mean of the last steps of a curve whose values are correlated."""
    values = chance.normal(size=count) / math.sqrt(1 - RHO**2)
    kept = np.zeros(count)
    for step in range(STEPS):
        values = RHO * values + chance.normal(size=count)
        if step >= STEPS - LAST:
            kept += values / LAST
    return kept


@pytest.fixture(scope="module")
def spread() -> float:
    """From seed to seed."""
    return float(numbers(200_000, np.random.default_rng(7)).std())


def found_share(pairs: int, difference: float) -> float:
    """The share of comparisons that find a difference, which is there or not."""
    chance = np.random.default_rng(1000 * pairs + round(10 * difference))
    first, second = (numbers(COMPARISONS * pairs, chance).reshape(COMPARISONS, pairs) for _ in range(2))
    tests = [paired(list(a), list(b + difference)) for a, b in zip(first, second, strict=True)]
    return sum(test.p is not None and test.p <= LEVEL for test in tests) / COMPARISONS


@pytest.mark.heavy
@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_equal_configurations_are_rarely_said_to_differ(pairs: int) -> None:
    assert found_share(pairs, 0.0) <= 0.065


@pytest.mark.parametrize("spreads", [1, 2])
@pytest.mark.parametrize("pairs", [3, 5, 8])
@pytest.mark.heavy
def test_differences_are_found_as_often_as_predicted(pairs: int, spreads: int, spread: float) -> None:
    predicted = power(spreads / math.sqrt(2), pairs, LEVEL)
    assert found_share(pairs, spreads * spread) == pytest.approx(predicted, abs=0.05)


def test_the_test_is_that_of_scipy_and_its_interval_agrees() -> None:
    chance = random.Random(3)
    for pairs in (3, 4, 9):
        first, second = ([chance.gauss(0, 1) for _ in range(pairs)] for _ in range(2))
        found, known = paired(first, second), stats.ttest_rel(second, first)
        assert found.p == pytest.approx(known.pvalue)
        assert found.interval(0.05) == pytest.approx(tuple(known.confidence_interval(0.95)))
        low, high = found.interval(found.p or 1.0)  # the interval of the level that just decides ends at 0
        assert min(abs(low), abs(high)) == pytest.approx(0.0, abs=1e-9)


def test_as_many_seeds_as_needed_find_it_in_four_of_five_cases() -> None:
    found = Paired(5, 1.0, 1.4, 1.0, 0.2)
    seeds = seeds_needed(found, LEVEL)
    assert seeds is not None
    assert power(1.0 / 1.4, seeds, LEVEL) >= 0.8 > power(1.0 / 1.4, seeds - 1, LEVEL)
    assert seeds_needed(Paired(5, 0.01, 1.0, 1.0, 0.9), LEVEL) is None
    assert seeds_needed(Paired(5, 0.0, 1.0, 1.0, 1.0), LEVEL) is None


@pytest.mark.parametrize("pairs", [1, 2])
def test_with_fewer_than_three_pairs_there_is_no_p_value(pairs: int) -> None:
    assert paired([0.0] * pairs, [5.0, 5.1][:pairs]).p is None


def test_pairs_that_all_differ_by_the_same_decide() -> None:
    found = paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
    assert (found.p, found.interval(0.05)) == (0.0, (0.5, 0.5))
    assert paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).p == 1.0


def test_several_comparisons_are_corrected() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []

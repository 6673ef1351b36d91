"""Whole RL steps against the reference: random runs by seed, one algorithm after the other, on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest

from rlhpc.config.algorithm import AlgorithmSection, KLSection, RolloutCorrectionSection
from rlhpc.config.training import OptimizerSection
from tests.float64 import script
from tests.float64.advantages import ADVANTAGES
from tests.float64.compare import LIMIT, run_and_compare, total_counts
from tests.float64.losses import LOSSES

# Two of each algorithm, and two that steer by a KL divergence while the critic warms up.
FEW = (*range(20), 159, 209)


def choices(section: type, key: str) -> tuple[str, ...]:
    return get_args(section.model_fields[key].annotation)  # type: ignore[attr-defined]


@pytest.mark.heavy
def test_every_algorithm_has_a_reference() -> None:
    """And every estimator, placement, correction and aggregation: add it to ``tests/float64`` with its formula."""
    from rlhpc.algo import ALGORITHMS

    assert set(ALGORITHMS) == set(ADVANTAGES) == set(LOSSES) == set(script.NAMES)
    assert choices(KLSection, "estimator") == script.ESTIMATORS
    assert choices(KLSection, "placement") == script.PLACEMENTS
    assert choices(AlgorithmSection, "aggregation") == script.AGGREGATIONS
    assert choices(RolloutCorrectionSection, "method") == script.METHODS
    assert choices(RolloutCorrectionSection, "level") == script.LEVELS
    assert set(choices(OptimizerSection, "schedule")) == set(script.SCHEDULES)


def test_every_key_of_the_algorithm_is_drawn() -> None:
    """A new key that changes what is learnt needs values in ``script.py`` and its formula in the reference."""
    drawn = [script.config_of(seed)["algorithm"] for seed in range(200)]
    assert {key for section in drawn for key in section} == set(AlgorithmSection.model_fields)
    assert {key for section in drawn for key in section["kl"]} == set(KLSection.model_fields)
    corrections = {key for section in drawn for key in section["rollout_correction"]}
    assert corrections == set(RolloutCorrectionSection.model_fields)


@pytest.mark.ranks
@pytest.mark.workers
def test_whole_steps_are_those_of_the_reference() -> None:
    check(FEW)


@pytest.mark.ranks
@pytest.mark.workers
@pytest.mark.long
def test_further_steps_are_those_of_the_reference() -> None:
    check(range(100, 220))


def check(seeds: Sequence[int]) -> None:
    found = run_and_compare(seeds)
    apart = [
        f"seed {each.seed} ({each.algorithm}): {kind} by {most:.1e}, {each.where[kind]}"
        for each in found
        for kind, most in each.largest.items()
        if not most < LIMIT
    ]
    assert not apart, "\n".join(apart)
    counts = total_counts(found)
    assert all(counts.values()), f"something is in none of the seeds: {counts}"

"""The time of a pipeline's schedule, and plans that make it short."""

from __future__ import annotations

import random

import pytest

from rlhpc.data.packing import Pipeline, Schedule, arranged, pack, sample_costs
from rlhpc.sharding.layout import best_microbatches
from tests.helpers.balance_table import CAPACITY, MODELS, drawn, pipelined


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_equal_microbatches_take_the_time_of_theirs_and_of_the_other_stages(stages: int, count: int) -> None:
    """Narayanan et al. 2021, section 2.2: (count + stages - 1) passes of one stage."""
    assert Pipeline(stages, 0.5).time([[2.0] * count] * 2) == pytest.approx(3 * 2.5 * (count + stages - 1))


def test_a_large_microbatch_holds_up_the_others_by_hand() -> None:
    """Two stages, passes of 1 and 2 forward on each stage, costs 2 and 4: first stage F F B B, the second F B F B."""
    # Stage 0: F0 0-1, F1 1-3. Stage 1: F0 1-2, B0 2-4, F1 4-6, B1 6-10. Stage 0: B0 4-6, B1 10-14. Units of a stage.
    assert Pipeline(2, 0.0).time([[2.0, 4.0]]) == 2 * 14


def test_the_slowest_rank_counts_and_interleaving_shortens_what_is_not_work() -> None:
    costs = [[3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    whole = Pipeline(4, 0.0).time(costs)
    assert whole == Pipeline(4, 0.0).time(costs[:1])
    assert Pipeline(4, 0.0, virtual_stages=3).time(costs) == pytest.approx(36 + (whole - 36) / 3)
    assert Pipeline(4, 0.5, virtual_stages=2).time([[3.0] * 5]) > Pipeline(4, 0.5, virtual_stages=2).time([[3.75] * 4])


def test_small_microbatches_are_at_both_ends() -> None:
    orders = list(arranged([5, 1, 4, 2, 3]))
    assert orders[0] == [0, 2, 4, 3, 1]
    assert orders[1] == [1, 4, 0, 2, 3]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_pipeline_takes_little_more_than_with_equal_microbatches(stages: int) -> None:
    """With many samples, none of which is a large part of the work; the fewest microbatches take up to 13% more."""
    ours, fewest, count, longest = pipelined(drawn(256, 0.7, 0), stages, MODELS["7B"])
    assert longest < 0.02
    assert ours <= 1.03
    assert ours <= fewest
    assert count > -(-sum(drawn(256, 0.7, 0)) // CAPACITY)


def test_plans_for_pipelines_keep_every_rule() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        dp, capacity = draw.randint(1, 4), draw.choice([40, 200, 10**6])
        lengths = [int(draw.lognormvariate(3, 1.2)) + 1 for _ in range(dp * draw.randint(1, 12))]
        schedule = Schedule(
            stages=draw.choice([2, 4]), virtual_stages=draw.choice([1, 2]), overhead=draw.choice([0, 9])
        )
        (plan,) = pack(lengths, dp, capacity, schedule=schedule)
        assert len({len(rank) for rank in plan.bins}) == 1
        assert sorted(i for rank in plan.bins for members in rank for i in members) == list(range(len(lengths)))
        assert all(len(m) <= 1 or sum(lengths[i] for i in m) <= capacity for rank in plan.bins for m in rank)
        (other,) = pack(lengths, dp, capacity)
        assert len(plan.bins[0]) >= len(other.bins[0])


def test_the_best_number_is_where_the_time_is_least() -> None:
    def seconds(count: int) -> float:
        return Pipeline(4, 2.0).time([[600 / count] * count])

    assert abs(min(range(1, 200), key=seconds) - best_microbatches(4, 1, 600, 2.0)) < 1


def test_places_of_ranks_cost_alike() -> None:
    """So that ranks with experts between them do not wait."""
    lengths = drawn(128, 0.7, 3)
    costs = sample_costs(lengths, *MODELS["7B"])
    schedule = Schedule(rows=True, stages=4, overhead=costs[0] / 8)
    (plan,) = pack(lengths, 2, CAPACITY, costs=costs, schedule=schedule)
    sums = [[sum(costs[i] for i in members) for members in rank] for rank in plan.bins]
    assert sum(map(max, zip(*sums, strict=True))) <= 1.05 * sum(costs) / 2

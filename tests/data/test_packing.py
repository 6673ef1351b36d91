"""Packing: every sample once, within capacity, the same number of microbatches everywhere, balanced."""

from __future__ import annotations

import random
import time

import pytest

from rlhpc.core.errors import UserError
from rlhpc.data.packing import PackPlan, pack, pack_globally, split_bins
from tests.helpers.packing_table import BUDGETS, RANKS, fewest, peer_lengths
from tests.helpers.peer_balance import imbalance


def check_plan(plan: PackPlan, lengths: list[int], ids: range) -> None:
    counts = {len(rank) for rank in plan.bins}
    assert len(counts) == 1
    assert sorted(i for rank in plan.bins for members in rank for i in members) == list(ids)
    for rank, cost in zip(plan.bins, plan.cost, strict=True):
        assert all(members for members in rank)
        assert all(len(m) == 1 or sum(lengths[i] for i in m) <= plan.capacity for m in rank)
        assert cost == sum(lengths[i] for members in rank for i in members)


def test_random_batches_keep_every_rule():
    for seed in range(300):
        draw = random.Random(seed)
        dp, minibatches = draw.randint(1, 6), draw.randint(1, 3)
        count = dp * minibatches * draw.randint(1, 12)
        lengths = [int(draw.lognormvariate(3, 1.2)) + 1 for _ in range(count)]
        plans = pack(lengths, dp, draw.choice([10, 40, 200, 10**6]), minibatches)
        assert len(plans) == minibatches
        size = count // minibatches
        for index, plan in enumerate(plans):
            assert len(plan.bins) == dp
            check_plan(plan, lengths, range(index * size, (index + 1) * size))


def test_samples_that_fill_a_microbatch_each_are_balanced_too():
    (plan,) = pack([65, 74, 75, 59, 63, 96], 2, 100)
    assert max(plan.cost) <= 218, "dealt out one by one"


def test_ready_micro_batches_are_dealt_out_the_dearest_first_and_the_fullest_are_halved():
    costs = [1, 5, 5, 9]
    ranks = pack_globally([10, 9, 8, 7], costs, range(4), 2, 10)
    assert [sum(costs[i] for members in rank for i in members) for rank in ranks] == [10, 10]
    assert sorted(split_bins([5, 5, 1, 1], [[0, 1], [2, 3]], 3)) == [[0], [1], [2, 3]]


def test_ranks_are_balanced_without_equal_counts():
    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(7.5, 0.9)) for _ in range(512)]
    (plan,) = pack(lengths, 64, 2**15)
    assert imbalance(plan.cost) <= 1.02
    assert len({sum(map(len, rank)) for rank in plan.bins}) > 1


def test_micro_batches_of_a_rank_are_balanced():
    draw = random.Random(1)
    lengths = [draw.randint(50, 150) for _ in range(256)]
    (plan,) = pack(lengths, 4, 2500)
    sums = [sum(lengths[i] for i in members) for rank in plan.bins for members in rank]
    assert max(sums) <= 1.1 * min(sums)


def test_few_micro_batches_are_made():
    (plan,) = pack([100] * 64, 2, 1600)
    assert [len(rank) for rank in plan.bins] == [2, 2]


@pytest.mark.heavy
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_plan_has_fewer_micro_batches(budget: int):
    """Where a rank's tokens are nearly a whole number of budgets too: 0.998 of them at 24,576 on 8 ranks."""
    lengths = peer_lengths()
    for ranks in RANKS:
        seconds = []
        for _ in range(3):  # the least of them, without a collection of all that other tests have left
            began = time.process_time()
            (plan,) = pack(lengths, ranks, budget)
            seconds.append(time.process_time() - began)
        assert min(seconds) < 0.05
        assert sum(map(len, plan.bins)) == fewest(lengths, ranks, budget)
        assert imbalance(plan.cost) < 1.001


@pytest.mark.heavy
def test_few_random_batches_need_more_micro_batches_than_tokens_fill():
    """Only such as leave less than a thousandth of the budget free."""
    draw = random.Random(1)
    for seed in range(60):
        lengths, ranks = peer_lengths(draw.choice([64, 128, 256, 512]), seed + 1), draw.choice([1, 2, 4, 8, 16])
        budget = max(lengths) + draw.randint(0, 40_000)
        (plan,) = pack(lengths, ranks, budget)
        best = fewest(lengths, ranks, budget)
        assert sum(map(len, plan.bins)) == best or sum(lengths) > 0.999 * best * budget


def test_a_sample_beyond_capacity_is_alone():
    (plan,) = pack([5, 5, 50, 5], 1, 10)
    assert (2,) in plan.bins[0]
    assert len(plan.bins[0]) == 3


def test_long_samples_leave_no_rank_with_too_few_micro_batches():
    # Rank 0's fair share would be the one long sample, while the others need three microbatches.
    lengths = [300, *[90] * 7]
    (plan,) = pack(lengths, 2, 100)
    check_plan(plan, lengths, range(8))
    assert [len(rank) for rank in plan.bins] == [4, 4]


def test_minibatches_are_contiguous_and_keep_groups_together():
    plans = pack([7] * 32, 2, 100, minibatches=2)
    groups = [{i // 8 for rank in plan.bins for members in rank for i in members} for plan in plans]
    assert groups == [{0, 1}, {2, 3}]


def test_plans_do_not_depend_on_anything_but_the_arguments():
    draw = random.Random(2)
    lengths = [draw.randint(1, 9) for _ in range(100)]
    assert pack(lengths, 3, 20, 2) == pack(list(lengths), 3, 20, 2)


def test_fewer_samples_than_ranks_names_the_key_and_numbers():
    with pytest.raises(UserError, match=r"train.minibatches: 3 samples in a minibatch cannot feed 4 .*; use fewer"):
        pack([1] * 6, 4, 10, minibatches=2)


def test_samples_too_few_for_equal_micro_batches_leave_the_last_ones_empty():
    """Three that fill a microbatch each, on two ranks: no rank is without any, none is over capacity."""
    (plan,) = pack([9, 9, 9], 2, 10)
    assert sorted(sorted(map(len, rank)) for rank in plan.bins) == [[0, 1], [1, 1]]
    assert sorted(i for rank in plan.bins for members in rank for i in members) == [0, 1, 2]
    draw = random.Random(5)
    for _ in range(300):
        ranks = draw.randint(1, 8)
        lengths = [draw.randint(4, 10) for _ in range(draw.randint(ranks, 3 * ranks))]
        (plan,) = pack(lengths, ranks, 10)
        assert len({len(rank) for rank in plan.bins}) == 1
        assert all(rank[0] and all(rank[: sum(map(bool, rank))]) for rank in plan.bins), "the empty ones are last"
        assert all(sum(lengths[i] for i in members) <= 10 for rank in plan.bins for members in rank)
        assert sorted(i for rank in plan.bins for members in rank for i in members) == list(range(len(lengths)))


def test_eight_thousand_samples_take_less_than_a_second():
    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(7.5, 0.9)) + 1 for _ in range(8192)]
    began = time.process_time()
    (plan,) = pack(lengths, 64, 16384)
    assert time.process_time() - began < 1
    check_plan(plan, lengths, range(8192))
    assert imbalance(plan.cost) <= 1.02

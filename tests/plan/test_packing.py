"""Packing: every sample once, within capacity, the same number of micro batches everywhere, balanced."""

from __future__ import annotations

import random
import time

import pytest

from rlhpc.core.errors import UserError
from rlhpc.plan.packing import PackPlan, pack


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


def test_ranks_are_balanced_without_equal_counts():
    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(7.5, 0.9)) for _ in range(512)]
    (plan,) = pack(lengths, 64, 2**15)
    assert plan.imbalance <= 1.02
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


def test_a_sample_beyond_capacity_is_alone():
    (plan,) = pack([5, 5, 50, 5], 1, 10)
    assert (2,) in plan.bins[0]
    assert len(plan.bins[0]) == 3


def test_long_samples_leave_no_rank_with_too_few_micro_batches():
    # Rank 0's fair share would be the one long sample, while the others need three micro batches.
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


def test_samples_that_cannot_be_dealt_out_name_the_capacity():
    with pytest.raises(UserError, match=r"train.tokens_per_microbatch: 3 samples.*10 tokens.*; raise it"):
        pack([9, 9, 9], 2, 10)


def test_eight_thousand_samples_take_less_than_a_second():
    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(7.5, 0.9)) + 1 for _ in range(8192)]
    began = time.process_time()
    (plan,) = pack(lengths, 64, 16384)
    assert time.process_time() - began < 1
    check_plan(plan, lengths, range(8192))
    assert plan.imbalance <= 1.02

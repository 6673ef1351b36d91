"""Which groups make a step's batch: full or reported, nothing of one score in it, nothing twice, nothing lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlhpc.config.rollout import replayed_groups
from rlhpc.trainer.sampling_plan import Bounds, Outcome, StepPlan, split_stale


def is_good(number: int, rate: float) -> bool:
    return random.Random(f"good {number}").random() < rate


def take_step(bounds: Bounds, plan: StepPlan, rate: float, draw: random.Random) -> Outcome:
    """A step in which groups end in any order, and are scored a few at a time."""
    while (batch := plan.next_batch()) is not None:
        assert set(batch) == plan.unfinished
        waiting = draw.sample(batch, len(batch))
        while waiting and not (bounds.oversample > 1 and not plan.missing):
            ended, waiting = waiting[:3], waiting[3:]
            plan.settle(*([n for n in ended if is_good(n, rate) is kind] for kind in (True, False)))
    return plan.finish()


@pytest.mark.parametrize("seed", range(40))
def test_over_many_steps_every_group_ends_in_one_place(seed):
    draw = random.Random(seed)
    rate = draw.choice([0.02, 0.2, 0.5, 0.9, 1.0])
    groups = draw.choice([1, 5, 16])
    bounds = Bounds(
        groups=groups,
        least=draw.choice([1, min(groups, 4)]),
        oversample=draw.choice([1.0, 1.3, 2.0]),
        max_batches=draw.choice([1, 3, 10]),
    )
    cursor, kept, unfinished = 0, set(), set()
    used, dropped, full = [], [], 0
    for _ in range(12):
        plan = StepPlan(bounds, cursor, set(kept), set(unfinished))
        outcome = take_step(bounds, plan, rate, draw)
        cursor, kept, unfinished = plan.cursor, set(outcome.kept), set(outcome.unfinished)
        used += outcome.taken
        dropped += outcome.dropped
        assert outcome.batches <= bounds.max_batches
        assert list(outcome.taken) == sorted(outcome.taken)
        if outcome.short:  # the bound is reported, and was reached
            assert outcome.batches == bounds.max_batches
            assert len(outcome.taken) in (0, bounds.groups - outcome.short)
        else:
            full += 1
            assert len(outcome.taken) == bounds.groups
        assert len(outcome.taken) >= bounds.least or not outcome.taken
        if bounds.oversample == 1:
            assert not unfinished
        places = [*used, *dropped, *kept, *unfinished]
        assert sorted(places) == list(range(cursor)), "nothing twice, nothing lost"
    assert all(is_good(number, rate) for number in used)
    assert not any(is_good(number, rate) for number in dropped)
    if rate == 1.0:
        assert full == 12


def test_what_is_missing_is_asked_for_by_the_share_that_was_good():
    plan = StepPlan(Bounds(groups=8, max_batches=10), cursor=100)
    assert plan.next_batch() == list(range(100, 108))
    plan.settle(good=range(100, 104), bad=range(104, 108))
    assert plan.next_batch() == list(range(108, 116))  # 4 are missing, and every other one is good
    plan.settle(good=range(108, 115), bad=[115])
    assert plan.next_batch() is None
    outcome = plan.finish()
    assert outcome.taken == (100, 101, 102, 103, 108, 109, 110, 111)
    assert outcome.kept == (112, 113, 114)
    assert (outcome.batches, outcome.short) == (2, 0)

    after = StepPlan(Bounds(groups=8, max_batches=10), plan.cursor, set(outcome.kept))
    assert after.next_batch() == list(range(116, 121))


def test_unfinished_groups_come_first_and_count():
    plan = StepPlan(Bounds(groups=4, oversample=1.5), cursor=20, unfinished={11, 13})
    assert plan.next_batch() == [11, 13, 20, 21, 22, 23]
    plan.settle(good=[13, 20, 22, 21], bad=[])
    assert plan.next_batch() is None
    assert plan.finish() == Outcome((13, 20, 21, 22), (), (11, 23), (), 1, 0)


@pytest.mark.parametrize(
    ("good", "unfinished", "staleness", "waits"),
    [
        ([5, 6], [3], {3: 1}, False),  # its turn is in the next step, with a staleness of 2
        ([5, 6], [3], {3: 2}, True),
        ([5, 6], [], {5: 2, 6: 2}, False),  # the batch itself
        ([5, 6], [1, 2, 3], {3: 1}, True),  # its turn is in the step after the next
        ([5, 6], [2, 3], {2: 1, 3: 1}, False),
        ([3, 5, 6], [2], {2: 1, 6: 1}, False),  # 3 and 5 are taken, 2 and 6 in the next step
    ],
)
def test_a_step_waits_for_groups_that_would_become_too_stale(good, unfinished, staleness, waits):
    plan = StepPlan(Bounds(groups=2, oversample=2.0, max_staleness=2), 9, set(good), set(unfinished), staleness)
    assert plan.waits is waits
    assert plan.next_batch() == (sorted(unfinished) if waits else None), "no new ones: the batch is full"


def test_no_more_is_started_than_can_be_trained_on_in_time():
    def started(**bounds: Any) -> int:
        plan = StepPlan(Bounds(groups=4, **bounds), 20, {10, 11})
        return len(plan.next_batch())

    assert started(oversample=9.0, max_staleness=2) == 3 * 4 - 2
    assert started(oversample=9.0, max_staleness=2, later=3) == 4 + 2 * 3 - 2
    assert started(oversample=2.0, max_staleness=2) == 4
    assert started(oversample=2.0, max_staleness=0) == 2
    plan = StepPlan(Bounds(groups=4, max_batches=2, max_staleness=0), 20, {10})
    assert plan.next_batch() == [20, 21, 22]
    plan.settle([20], [21, 22])
    assert plan.next_batch() == [23, 24, 25, 26], "without oversampling, as many as should fill the batch"


def test_too_few_to_learn_from_are_kept():
    plan = StepPlan(Bounds(groups=4, least=2), cursor=0)
    plan.next_batch()
    plan.settle(good=[2], bad=[0, 1, 3])
    assert plan.finish() == Outcome((), (2,), (), (0, 1, 3), 1, 3)


def test_a_group_that_was_not_asked_for_is_refused():
    plan = StepPlan(Bounds(groups=2), cursor=0)
    plan.next_batch()
    plan.settle([0], [])
    with pytest.raises(AssertionError, match="not requested"):
        plan.settle([0], [])


def test_staleness_is_counted_in_versions():
    fresh, stale = split_stale({1: 5, 2: 6, 3: 9}, version=10, max_staleness=4)
    assert (set(fresh), set(stale)) == ({2, 3}, {1})


@pytest.mark.parametrize(
    ("groups", "fraction", "available", "count"), [(8, 0.25, 9, 2), (8, 0.25, 1, 1), (8, 0.9, 99, 7), (1, 0.9, 5, 0)]
)
def test_a_step_has_something_new(groups, fraction, available, count):
    assert replayed_groups(groups, fraction, available) == count

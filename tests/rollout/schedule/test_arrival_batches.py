"""A step takes what no later step may take, and waits for it, before what was finished first."""

from __future__ import annotations

from rlhpc.rollout.schedule.arrival_batches import ArrivalBatches, TakenGroups
from rlhpc.rollout.schedule.terms import Costs, Terms

TERMS = Terms(
    engines=1, groups_per_step=2, max_staleness=1, steps=9, slots=8, costs=Costs.of_seconds(1, 1, 1), order="arrival"
)


def test_a_step_waits_for_a_group_that_is_too_old_for_the_next() -> None:
    batches = ArrivalBatches(TERMS, 0, TakenGroups())
    assert batches.open_pot(0, 0, 0).count == 4
    for group in (2, 1):
        batches.judge(group)
    first = batches.close()
    assert first is not None
    assert first.kept == (1, 2)
    pot = batches.open_pot(1, 3, 0)  # group 0 has started with version 0
    assert (pot.first, pot.count, pot.former_places) == (3, 3, 3)
    for group in (3, 4):
        batches.judge(group)
    assert batches.close() is None
    batches.judge(0)
    second = batches.close()
    assert second is not None
    assert second.kept == (0, 3)
    assert batches.taken.cursor == 4


def test_what_nobody_has_starts_again_with_the_present_version() -> None:
    batches = ArrivalBatches(TERMS, 0, TakenGroups())
    batches.open_pot(0, 0, 0)
    batches.judge(1)
    assert batches.lose(held={2}, waiting={3}, drawn=4, dropped=0) == [0]

"""When a group is finished, what is delivered of it, and when it is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.api import Sample
from rlhpc.rollout.generator.shelf import GREEDY, HeldGroup, Shelf
from rlhpc.rollout.requests import Sampling
from tests.rollout.generator.values import blank_group, prompt, scored

GREEDY_SAMPLING = Sampling(8, 0.0, 1.0)


def differs(samples: tuple[Sample, ...]) -> bool:
    return len({sample.reward for sample in samples}) > 1


def test_a_group_is_finished_with_its_last_response_and_judged_by_the_filter() -> None:
    shelf = Shelf(differs)  # type: ignore[arg-type]
    for number in (3, 4):
        shelf.add(HeldGroup(blank_group(number)))
    assert not shelf.put([scored(4, 0, 1.0), scored(3, 1, 1.0)])
    found = shelf.put([scored(4, 1, 0.0), scored(3, 0, 1.0)])
    assert [(group.number, group.keeps) for group in found] == [(3, False), (4, True)]
    assert [sample.reward for sample in found[1].group.samples] == [1.0, 0.0]
    assert shelf.delivered == found


def test_a_greedy_response_belongs_to_its_group_and_counts_only_its_failures() -> None:
    shelf = Shelf(bool)
    shelf.add(HeldGroup(blank_group(3), blank_group(3, count=1)))
    calls: dict[str, Any] = {"tool_calls": 2, "failed_tool_calls": 1, "failures": ("raised",)}
    assert not shelf.put([scored(3, 0, **calls), scored(3, 1, dropped=True)])
    (found,) = shelf.put([scored(3, GREEDY, 0.5, **calls)])
    assert found.greedy is not None
    assert found.greedy.reward == 0.5
    assert found.keeps
    counts = found.counts
    assert (counts.tool_calls, counts.failed_tool_calls, counts.reward_failures) == (2, 1, {"raised": 2})


@pytest.mark.parametrize("greedy", [False, True])
def test_a_group_without_usable_responses_is_not_kept(greedy: bool) -> None:
    shelf = Shelf(bool)
    shelf.add(HeldGroup(blank_group(3), blank_group(3, count=1) if greedy else None))
    found = shelf.put([scored(3, 0, dropped=True), scored(3, 1, dropped=True), *[scored(3, GREEDY)] * greedy])
    assert [group.keeps for group in found] == [False]


def test_tasks_are_the_responses_left_with_the_seeds_of_their_places() -> None:
    shelf = Shelf(bool)
    shelf.add(held := HeldGroup(blank_group(3, count=3, step=7), blank_group(3, count=1, step=7)))
    shelf.put([scored(3, 1)])
    roots = [(task.index, task.root) for task in shelf.held[3].tasks(prompt(3), seed=5, greedy=GREEDY_SAMPLING)]
    assert roots == [(0, (5, 7, 3, 0)), (2, (5, 7, 3, 2)), (GREEDY, (5, 7, 3, 0))]
    assert len(held.tasks(prompt(3), seed=5, greedy=GREEDY_SAMPLING)) == 4


def test_consumed_groups_are_forgotten_and_must_be_finished() -> None:
    shelf = Shelf(bool)
    for number in range(4):
        shelf.add(HeldGroup(blank_group(number)))
    shelf.put([scored(number, index) for number in (0, 1) for index in (0, 1)])
    shelf.forget(2)
    assert sorted(shelf.held) == [2, 3]
    with pytest.raises(AssertionError, match=r"groups \[2\] are consumed"):
        shelf.forget(3)


def test_a_group_is_requested_once() -> None:
    shelf = Shelf(bool)
    shelf.add(HeldGroup(blank_group(0)))
    with pytest.raises(AssertionError, match="requested twice"):
        shelf.add(HeldGroup(blank_group(0)))

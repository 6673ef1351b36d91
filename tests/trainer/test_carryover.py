"""What a step leaves to the next ones, and what of it a resumed run takes up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.api import Prompt
from rlhpc.config.schema import TrainSection
from rlhpc.data.groups import Group
from rlhpc.trainer.carryover import Carryover
from tests.data.test_groups import make_group


def numbers(groups: list[Group]) -> list[int]:
    return [group.number for group in groups]


def same(number: int) -> Prompt:
    return Prompt(7, (5, 6), "", "", {})


def test_a_step_that_was_too_small_is_not_too_small_for_ever():
    """Groups of which samples were left out are not taken again."""
    carryover = Carryover(ready=[make_group(9)])
    carryover.put_back([make_group(3), replace(make_group(4), dropped=(False, True)), make_group(5)])
    assert numbers(carryover.ready) == [3, 5, 9]


@pytest.mark.parametrize(
    ("prompt_cursor", "prompt_at", "taken"),
    [
        (3, same, ([2], [1])),
        (2, same, ([], [])),  # the prompts have started over
        (3, lambda number: Prompt(7, (5, number), "", "", {}), ([], [])),  # or have another order: another seed
    ],
)
def test_groups_of_other_prompts_are_let_go(tmp_path: Path, prompt_cursor: int, prompt_at, taken):
    Carryover(ready=[make_group(2)], unfinished=[make_group(1)]).save(tmp_path)
    carryover = Carryover()
    carryover.load(tmp_path, prompt_cursor, prompt_at)
    assert (numbers(carryover.ready), numbers(carryover.unfinished)) == taken


def test_groups_of_old_weights_are_forgotten_wherever_they_lie():
    carryover = Carryover(
        ready=[make_group(1, version=3), make_group(2, version=4)],
        unfinished=[make_group(3, version=5), make_group(4, version=3)],
    )
    assert numbers(carryover.forget_stale(policy_version=5, max_staleness=1)) == [1, 4]
    assert (numbers(carryover.ready), numbers(carryover.unfinished)) == ([2], [3])


def test_replayed_groups_outlive_an_attempt_of_the_run(tmp_path: Path):
    section = TrainSection(steps=1, replay={"capacity": 2})
    carryover = Carryover.of(section)
    carryover.save(tmp_path)
    carryover.load(tmp_path, 3, same)
    assert not list(tmp_path.iterdir()), "a file of nothing"
    carryover.replay.add([make_group(0), make_group(2)])
    carryover.save(tmp_path)
    again, without = Carryover.of(section), Carryover.of(TrainSection(steps=1))
    for each in (again, without):
        each.load(tmp_path, 3, same)
    assert numbers(again.replay.groups) == [0, 2]
    assert without == Carryover()

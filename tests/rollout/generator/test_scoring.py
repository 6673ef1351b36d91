"""Models beside engines score every group once before it is delivered, and change nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.data.groups import Group
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.generator.messages import FinishedGroup, StartPoint
from tests.rollout.generator.test_loop import SAVED, consumed, saves, world
from tests.rollout.generator.worlds import Outcome, plain

pytestmark = pytest.mark.heavy

PART = 100.0  # of the reward
CASES = ("one engine", "tools, filter, greedy", "results a step late")


class SlowModels:
    """Adds a part to rewards, and log-probs of a reference; takes long at times."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self.held_out = 0

    def score(self, groups: Sequence[FinishedGroup]) -> list[FinishedGroup]:
        time.sleep(self._random.choice([0.0, 0.003]))
        return [self._scored(one) if one.keeps else one for one in groups]

    def score_held_out(self, found: Sequence[Scored]) -> list[Scored]:
        self.held_out += len(found)
        return [replace(one, sample=_rewarded(one.sample)) for one in found]

    @staticmethod
    def _scored(one: FinishedGroup) -> FinishedGroup:
        assert all(sample.routed_experts is None for sample in one.group.samples)
        samples = [replace(_rewarded(s), reference_log_probs=s.log_probs - 1) for s in one.group.samples]
        greedy = _rewarded(one.greedy) if one.greedy is not None else None
        return replace(one, group=replace(one.group, samples=tuple(samples)), greedy=greedy)


def _rewarded(sample: Any) -> Any:
    return replace(sample, reward=sample.reward + PART)


def _without(one: FinishedGroup) -> FinishedGroup:
    """The group before it was scored, which must have happened once."""
    if not one.keeps:
        return one
    for sample in one.group.samples:
        np.testing.assert_array_equal(sample.reference_log_probs, sample.log_probs - 1)
    samples = [*one.group.samples, *([one.greedy] if one.greedy is not None else [])]
    assert all(PART <= sample.reward <= PART + 1 for sample in samples), [sample.reward for sample in samples]
    before: Group = replace(one.group, samples=tuple(replace(s, reward=s.reward - PART) for s in one.group.samples))
    greedy = replace(one.greedy, reward=one.greedy.reward - PART) if one.greedy is not None else None
    return replace(one, group=before, greedy=greedy)


def _trained(outcome: Outcome) -> list[int]:
    return [number for batch in outcome.batches for number in batch]


@pytest.mark.parametrize("name", CASES)
def test_groups_are_scored_once_and_otherwise_the_same(name: str) -> None:
    """The schedule does not know of it: the same groups, tokens and batches as without models."""
    plainly, scored = world(name), world(name, models=SlowModels())
    assert scored.batches == plainly.batches
    assert set(scored.times.values()) == {1}
    for number in _trained(plainly):
        assert plain(_without(scored.groups[number])) == plain(plainly.groups[number])
    assert sum(activity.idle.get("models", 0.0) for activity in scored.activity) > 0


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_engine_scores_what_it_delivers_again(name: str, tmp_path: Path) -> None:
    first = world(name, decide=partial(saves, tmp_path), models=SlowModels())
    again = world(name, start=StartPoint(SAVED, consumed(first, SAVED), str(tmp_path)), models=SlowModels())
    assert again.batches == first.batches[SAVED:]
    assert set(again.times.values()) == {1}
    for number in _trained(again):
        assert plain(again.groups[number]) == plain(first.groups[number])
        _without(again.groups[number])


def test_answers_to_held_out_prompts_are_scored_once() -> None:
    models = SlowModels()
    quiet = world("one engine", decide=lambda version: {"validates": version == 2})
    outcome = world("one engine", decide=lambda version: {"validates": version == 2}, models=models)
    rewards = [scored.sample.reward - PART for scored in outcome.validated[2]]
    assert rewards == [scored.sample.reward for scored in quiet.validated[2]]
    assert models.held_out == len(rewards) > 0

"""What the trainers take from engines on ranks of their own: batches in the order of the run, not of arrival; each
group once; ages of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlhpc.api import RunState, Sample
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.generator.messages import Activity, Delivered, FinishedGroup, Validated, Written
from rlhpc.rollout.schedule.terms import Costs, Terms
from rlhpc.trainer.engine_desk import Link
from rlhpc.trainer.engine_side import EngineSide
from rlhpc.trainer.publisher import Publisher
from rlhpc.trainer.staleness import age_metrics, age_sums, ages_of, token_ages
from tests.data.test_groups import make_group
from tests.rollout.generator.worlds import make_config

TERMS = Terms(
    engines=2,
    groups_per_step=2,
    max_staleness=1,
    steps=9,
    slots=4,
    costs=Costs.of_seconds(0.1, 0.01, 1.0),
    filtered=True,
)


class Messages:
    """An inbox that holds what the test puts in, and a board that remembers."""

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.posted: dict[str, Any] = {}
        self.published: list[int] = []
        self.offloads = 0

    def take(self) -> list[Any]:
        taken, self.arrived = self.arrived, []
        return [(0, message) for message in taken]

    def wait(self, *_: Any) -> bool:
        assert self.arrived, "nothing would ever arrive"
        return True

    def post(self, key: str, value: Any) -> None:
        self.posted[key] = value

    def drop(self, key: str) -> None:
        del self.posted[key]

    def publish(self, version: int) -> None:
        self.published.append(version)

    def offload(self) -> None:
        self.offloads += 1


@pytest.fixture
def messages() -> Messages:
    return Messages()


@pytest.fixture
def side(messages: Messages, alone: None, tmp_path: Path) -> EngineSide:
    channels: Any = (object(), object())
    link = Link(messages, messages, channels, EngineActivity([2, 3]), AttemptFolder(tmp_path))  # type: ignore[arg-type]
    made = EngineSide(messages, TERMS, link)  # type: ignore[arg-type]
    made.begin(RunState(step=3, prompt_cursor=10, policy_version=3), None)
    return made


def _delivered(engine: int, *numbers: int, drops: tuple[int, ...] = (), version: int = 3) -> Delivered:
    groups = [FinishedGroup(number, make_group(number), number not in drops) for number in numbers]
    return Delivered(engine, groups, Activity(1.0), version)


def test_batches_are_in_the_order_of_the_run_and_a_resumed_engine_may_deliver_again(
    side: EngineSide, messages: Messages
) -> None:
    messages.arrived = [
        _delivered(1, 13, 11),
        _delivered(0, 12, drops=(12,)),
        _delivered(0, 8, 10, 14),
        _delivered(1, 11),
    ]
    first = side.batch(4)
    assert messages.offloads == 1  # as the plan of GPU memory has it: other models compute next
    assert [one.number for one in first.kept] == [10, 11]
    assert (first.dropped, first.end, first.queued) == ([], 12, 3)
    messages.arrived = [_delivered(1, 11, 13)]  # again
    second = side.batch(5)
    assert [one.number for one in second.kept] == [13, 14]
    assert [one.number for one in second.dropped] == [12]
    assert (second.end, second.queued) == (15, 0)


def test_versions_leave_the_board_when_all_engines_have_them(side: EngineSide, messages: Messages) -> None:
    for step in (3, 4, 5):
        state = RunState(step=step, policy_version=step, prompt_cursor=10)
        side.publish(state, checkpoint=None, validates=False, ends=False)
    messages.arrived = [_delivered(0, 10, version=5), _delivered(1, 11, version=4)]
    side.batch(4)
    side.publish(RunState(step=6, policy_version=6, prompt_cursor=12), checkpoint=None, validates=False, ends=False)
    assert sorted(key for key in messages.posted if key.startswith("published/")) == [
        "published/4",
        "published/5",
        "published/6",
    ]
    assert messages.published == [3, 4, 5, 6]
    assert side.oldest_policy_version(6, 6) == 5


def test_a_step_in_which_nothing_changed_makes_no_policy_version_and_the_bound_knows(side: EngineSide) -> None:
    for step, policy_version in ((3, 3), (4, 3), (5, 3)):
        state = RunState(step=step, policy_version=policy_version)
        side.publish(state, checkpoint=None, validates=False, ends=False)
    assert side.oldest_policy_version(5, 3) == 3


def test_a_step_takes_its_groups_once(side: EngineSide, messages: Messages) -> None:
    messages.arrived = [_delivered(0, 10, 12), _delivered(1, 11, 13)]
    with pytest.raises(UserError, match=r"^train.step: step 4 has generated not at all, .*; call generate once in eac"):
        side.check_taken(4)
    side.batch(4)
    with pytest.raises(UserError, match=r"^train.step: step 4 has generated twice"):
        side.batch(4)
    side.check_taken(4)


def test_a_validation_is_taken_once_all_engines_have_answered(side: EngineSide, messages: Messages) -> None:
    sample = make_group(0).samples[0]
    found = [Scored(place, 0, replace(sample, group_id=place)) for place in range(3)]
    side.publish(RunState(step=3), checkpoint=None, validates=True, ends=False)
    messages.arrived = [Validated(1, 3, found[2:], 9.0), Validated(0, 3, found[:2], 7.0)]
    taken = side.validation()
    assert side.validation_seconds == 9.0
    assert taken is not None
    assert (taken[0], [each.group_id for each in taken[1]]) == (3, [0, 1, 2])
    assert side.validation() is None


def test_a_checkpoint_waits_for_every_engine_and_raises_the_error_of_one(side: EngineSide, messages: Messages) -> None:
    assert side.share(3) is None
    side.publish(RunState(step=3), checkpoint=Path("folder"), validates=False, ends=False)
    share = side.share(3)
    assert share is not None
    messages.arrived = [Written(0, 3)]
    assert not share.done()
    with pytest.raises(AssertionError, match="nothing would ever arrive"):
        side.wait_for_writing()
    messages.arrived = [Written(1, 3, OSError(28, "No space left on device"))]
    side.wait_for_writing()
    assert share.done()
    with pytest.raises(OSError, match="No space"):
        share.finish()
    share.finish()  # nothing is left to wait for


def test_other_ranks_take_part_in_a_checkpoint_that_the_first_one_waits_for(messages: Messages) -> None:
    """All ranks have a share: one without would commit the checkpoint at once, and wait for the others there."""
    other = EngineSide(messages, TERMS, None)  # type: ignore[arg-type]
    other.publish(RunState(step=3), checkpoint=Path("folder"), validates=False, ends=False)
    share = other.share(3)
    assert share is not None
    assert share.done()
    share.finish()
    assert other.share(3) is None


def test_ages_count_from_the_version_of_each_token() -> None:
    sample = Sample(0, 0, np.arange(5, dtype=np.int32), 2, np.zeros(3, np.float32), 0.0, 4, truncated=False)
    mixed = replace(sample, token_versions=np.array([4, 5, 6], np.int32))
    ages = token_ages([sample, mixed], 6)
    assert [each.tolist() for each in ages] == [[2, 2, 2], [2, 1, 0]]
    assert ages_of(ages) == (0, 1, 2)


def test_metrics_by_age_are_means_over_the_tokens_of_that_age() -> None:
    age, mask = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    values = {
        "mismatch_kl": torch.tensor([1.0, 2.0, 4.0, 9.0]),
        "logprob_diff_mean": torch.tensor([0.5, 1.0, 3.0, 9.0]),
    }
    sums = {name: float(value) for name, value in age_sums((0, 1), age, mask, values).items()}
    assert age_metrics([sums], (0, 1)) == {
        "staleness/0/token_fraction": pytest.approx(1 / 3),
        "staleness/0/mismatch_kl": 1.0,
        "staleness/0/logprob_diff_mean": 0.5,
        "staleness/1/token_fraction": pytest.approx(2 / 3),
        "staleness/1/mismatch_kl": 3.0,
        "staleness/1/logprob_diff_mean": 2.0,
    }


class Engines:
    """Answers in the order of the versions."""

    validation_seconds = 10.0

    def __init__(self) -> None:
        self.validating: list[int] = []
        self.answers: list[Any] = [object()] * 3

    def check_taken(self, steps: int) -> None: ...

    def begin(self, state: RunState, checkpoint: Path | None) -> None: ...

    def publish(self, state: RunState, *, checkpoint: Path | None, validates: bool, ends: bool) -> None:
        self.validating += [state.step] if validates else []

    def validation(self) -> tuple[int, list[Sample]] | None:
        return (self.validating.pop(0), self.answers) if self.validating else None


class Evaluator:
    asked: ClassVar[list[object]] = [object()] * 4

    def record(self, state: RunState, samples: list[Sample]) -> dict[str, float]:
        return {"validation/reward_mean": 0.5}


class Models:
    trained: ClassVar[dict[str, Any]] = {}


def _validations(first: RunState, stops: int = 6, **changes: Any) -> list[tuple[int, float]]:
    """Steps of an attempt of 6 steps that have a validation in their record, with the versions that it is of."""
    config, engines = make_config(**changes), Engines()
    publisher = Publisher(config, Models(), Evaluator(), engines, None, first)  # type: ignore[arg-type]
    found = [(first.step, publisher.begin(None))]
    while first.step < stops:
        first.step += 1
        found.append((first.step, publisher.step(saves=False, stops=first.step == stops)))
    assert not engines.validating, "a validation is not waited for"
    return [(step, metrics["validation/step"]) for step, metrics in found if metrics]


def test_a_validation_is_in_the_record_of_the_next_step_and_at_the_end_in_its_own() -> None:
    assert _validations(RunState(), validation__every=2) == [(0, 0.0), (3, 2.0), (5, 4.0), (6, 6.0)]
    assert _validations(RunState(), validation__every=1) == [(step, float(step)) for step in range(7)]
    assert _validations(RunState(), stops=4, validation__every=2) == [(0, 0.0), (3, 2.0), (4, 4.0)]


def test_a_resumed_run_may_validate_more_often_than_before() -> None:
    """The checkpoint of step 2 was written before its validation had ended."""
    resumed = RunState(step=2, validated_step=0)
    assert _validations(resumed, validation__every=1) == [(3, 2.0), (4, 3.0), (5, 4.0), (6, 6.0)]


def test_an_end_waits_for_the_validations_of_its_step_and_of_the_one_before() -> None:
    config = make_config(validation__every=2)
    for step, seconds in ((1, 10.0), (2, 10.0), (5, 10.0)):
        publisher = Publisher(config, Models(), Evaluator(), Engines(), None, RunState(step=step))  # type: ignore[arg-type]
        assert publisher.end_seconds == seconds
    config = make_config(validation__every=5)
    publisher = Publisher(config, Models(), Evaluator(), Engines(), None, RunState(step=2))  # type: ignore[arg-type]
    assert publisher.end_seconds == 0.0


def test_the_share_of_answers_is_recorded_where_engines_may_be_lost() -> None:
    """Of eight that are wanted; without any there is no validation."""
    rejoin = {"placement": "separate", "recovery": {"lost_engines": "rejoin"}}
    config, engines = make_config(validation__every=1, **rejoin), Engines()
    publisher = Publisher(config, Models(), Evaluator(), engines, None, RunState())  # type: ignore[arg-type]
    assert publisher.begin(None)["validation/answered_fraction"] == 3 / 8
    engines.answers = []
    publisher.state.step = 1
    assert publisher.step(saves=False, stops=True) == {}

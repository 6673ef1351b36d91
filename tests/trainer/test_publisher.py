"""Which step's record has which validation if engines answer beside training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from rlhpc.api import RunState, Sample
from rlhpc.trainer.publisher import Publisher
from tests.rollout.generator.worlds import make_config


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

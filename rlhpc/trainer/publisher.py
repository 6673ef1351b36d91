"""Publishes the versions of a run whose engines have ranks of their own, and records their validations.

A validation goes on beside the next step, whose record has it. The trainers wait for it at the last step, before they
stop, with checkpoint.keep_best, and where the next version is validated too: a record has one validation. A resumed run
may have one left of the version that it begins with, and others follow a step later then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlhpc.api import RunState
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.config.schema import RunConfig
from rlhpc.parallel.agreement import together
from rlhpc.trainer.engine_side import EngineSide
from rlhpc.trainer.evaluate import Evaluator, check_finite_weights
from rlhpc.trainer.roles import Models

Metrics = dict[str, float]


@dataclass
class Publisher:
    """Publishes the version of each step. Its methods are collective over the trainers' ranks."""

    config: RunConfig
    models: Models
    evaluator: Evaluator | None
    engines: EngineSide
    store: CheckpointStore
    state: RunState

    def begin(self, checkpoint: Path | None) -> Metrics:
        """Publishes the attempt's first version, after which the engines generate; the validation before step 1.
        ``checkpoint``: the one that is resumed."""
        state = self.state
        if state.validated_step is None:
            state.validated_step = state.step or -1
        validates = self._validates(state.step) and state.validated_step < state.step
        self.engines.begin(state, checkpoint)
        self._publish(None, validates=validates, ends=False)
        return self._validation() if state.step == 0 else {}

    def step(self, *, saves: bool, stops: bool) -> Metrics:
        """Publishes the weights of the present step. Without ``saves`` it is not going to be saved, unless it is the
        best one; with ``stops`` it is the last one of the attempt. Returns the validation in the step's record."""
        state, config = self.state, self.config
        self.engines.check_taken(state.step)
        found = self._validation()
        ends = stops or state.step == config.train.steps
        validates, compares = self._validates(state.step), config.checkpoint.best_metric is not None
        folder = self._folder() if saves or (validates and compares) else None
        self._publish(folder, validates=validates, ends=ends)
        waits = ends or compares or (not found and self._validates(state.step + 1))
        if validates and waits:  # a record has one validation, the newer one
            found = self._validation()
        return found

    @property
    def end_seconds(self) -> float:
        """Seconds of the validations of the present step and of the next one, for which an end after the latter waits,
        as far as this rank knows."""
        steps = (self.state.step, self.state.step + 1)
        return self.engines.validation_seconds * sum(map(self._validates, steps))

    def _folder(self) -> Path:
        """Folder of the step's checkpoint; the engines have written their parts of former ones."""
        self.engines.wait_for_writing()
        self.store.settle(wait=True)
        together(self.engines.finish_writing)
        return self.store.begin(self.state)

    def _publish(self, checkpoint: Path | None, *, validates: bool, ends: bool) -> None:
        if validates or checkpoint is not None:
            trained = self.models.trained
            check_finite_weights({name: role.model for name, role in trained.items()}, self.state)
        self.engines.publish(self.state, checkpoint=checkpoint, validates=validates, ends=ends)

    def _validates(self, step: int) -> bool:
        """True if the version after a number of RL steps is validated."""
        config = self.config
        return self.evaluator is not None and (step % config.validation.every == 0 or step == config.train.steps)

    def _validation(self) -> Metrics:
        """The validation that is to be recorded next; waits for the engines' answers."""
        answers, evaluator = self.engines.validation(), self.evaluator
        if answers is None or evaluator is None:
            return {}
        version, samples = answers
        self.state.validated_step = version
        if not samples:  # all engines that were to answer were lost
            return {}
        metrics = evaluator.record(replace(self.state, step=version), samples)
        if self.config.may_lose_engines:  # those of lost engines are missing
            wanted = len(evaluator.asked) * self.config.validation.samples_per_prompt
            metrics["validation/answered_fraction"] = len(samples) / wanted
        return {**metrics, "validation/step": float(version)}

"""Everything that the loop and a step work with on one rank. What they call takes only the parts that it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlhpc.algo import Algorithm
from rlhpc.api import RunState, TrainBackend
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.data.sft import SFTSet
from rlhpc.observe.metrics import Stopwatch
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.choosing import Chooser, Sampled
from rlhpc.trainer.engine_side import EngineSide
from rlhpc.trainer.evaluate import Evaluator
from rlhpc.trainer.judge_side import JudgeSide
from rlhpc.trainer.roles import Models
from rlhpc.trainer.step_data import StepData
from rlhpc.trainer.training_samples import SampleTexts
from rlhpc.trainer.update import Updater


class Generation(Protocol):
    """Source of the samples of a run's steps. Its methods are collective."""

    @property
    def chooser(self) -> Chooser:
        """Chooses what a step trains on."""

    def generate(self, state: RunState, clock: Stopwatch) -> Sampled:
        """The groups of the next step, scored but for the reward model's part. Leaves an engine of this rank asleep."""

    def statistics(self) -> dict[str, float]:
        """Those of the engines since the last call, each on one rank."""


@dataclass
class Run:
    """A run as built by ``rlhpc.trainer.build``."""

    config: RunConfig
    context: RankContext
    models: Models
    algorithm: Algorithm
    batching: Batching
    updater: Updater
    carryover: Carryover
    rl: Generation | None = None  # None without RL steps
    engines: EngineSide | None = None  # with placement separate
    judges: JudgeSide | None = None  # None if all models are on the ranks that train
    evaluator: Evaluator | None = None  # None without held-out prompts
    texts: SampleTexts | None = None  # of what RL trains on; None without RL steps
    sft: SFTSet | None = None  # None without a warm-up
    closers: tuple[Callable[[], None], ...] = ()  # called at the end of the run
    step_data: StepData | None = (
        None  # of the step that ended last; None if it trained on nothing, or is the user's own
    )

    @property
    def actor(self) -> TrainBackend:
        return self.models.actor.model

    @property
    def reference(self) -> TrainBackend | None:
        return self.models.reference.model if self.models.reference is not None else None

    @property
    def critic(self) -> TrainBackend | None:
        return self.models.critic.model if self.models.critic is not None else None

    def close(self) -> None:
        """Ends reward workers, tools, the engine and background writers."""
        for close in self.closers:
            close()

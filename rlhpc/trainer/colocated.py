"""Generation on the ranks that train, in turn with training."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.api import RunState
from rlhpc.core.heartbeat import touch
from rlhpc.observe.metrics import Stopwatch
from rlhpc.reshard.manager import ReshardManager
from rlhpc.trainer.choosing import Chooser, Sampled
from rlhpc.trainer.sampling import Sampler


@dataclass
class Colocated:
    """Syncs the actor's weights into this rank's engine, and generates with it until the step has its groups."""

    weights: ReshardManager
    sampler: Sampler

    @property
    def chooser(self) -> Chooser:
        return self.sampler.chooser

    def generate(self, state: RunState, clock: Stopwatch) -> Sampled:
        touch("weight sync", state.step + 1)
        with clock("weight_sync"):
            self.weights.sync()
        touch("rollout", state.step + 1)
        with clock("rollout"):
            sampled = self.sampler.sample(state)
            self.weights.sleep()
        return sampled

    def statistics(self) -> dict[str, float]:
        return self.sampler.rollout.statistics()

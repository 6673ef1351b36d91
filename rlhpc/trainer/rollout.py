"""This rank's engine with its reward workers and tools: prompts in, scored samples out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.api import Prompt, RewardWorkers, RolloutEngine, RunState
from rlhpc.config.rollout import RolloutSection
from rlhpc.rollout.collect import Collector, Scored
from rlhpc.rollout.requests import Sampling, Task, blank_draft, first_samples
from rlhpc.rollout.tools import ToolUse
from rlhpc.trainer.roles import EngineRank
from rlhpc.trainer.routed_experts import without_routed_experts


@dataclass
class Rollout:
    """An engine in this process. It must be awake with the actor's weights whenever it generates."""

    engine: RolloutEngine
    place: EngineRank
    section: RolloutSection
    seed: int
    reward_workers: RewardWorkers | None  # on the engine's first rank
    tools: ToolUse | None

    def collector(self, state: RunState, sampling: Sampling) -> Collector:
        """Collects responses."""
        return Collector(self.engine, sampling, self.reward_workers, state.policy_version, self.tools)

    def statistics(self) -> dict[str, float]:
        """Those of the engine since the last call, on its first rank only."""
        found = self.engine.statistics()
        return found if self.place.leads else {}

    def answer(
        self, state: RunState, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling
    ) -> list[Scored]:
        """Samples of the prompts that this rank's engine answers, in the prompts' order, whose places are the group
        ids; none on other ranks than the engine's first. A dropped sample has a reward of 0. They have no routed
        experts: these samples are not trained on."""
        firsts = first_samples([prompt.prompt_id for prompt in prompts], samples_per_prompt)
        collector = self.collector(state, sampling)
        collector.begin(
            [
                Task(place, index, prompts[place], blank_draft(prompts[place], state.policy_version, place), root)
                for place in self.place.own(len(prompts))
                for index in range(samples_per_prompt)
                for root in [(self.seed, state.step, prompts[place].prompt_id, firsts[place] + index)]
            ]
        )
        collector.advance()
        return without_routed_experts(collector.harvest())

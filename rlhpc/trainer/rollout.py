"""The engines with their reward workers and tools, as this rank uses them: prompts in, scored samples out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhpc.api import Prompt, RewardWorkers, RolloutEngine, RunState
from rlhpc.config.rollout import RolloutSection
from rlhpc.parallel.transfer import gather_objects
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.dealing import Rules
from rlhpc.rollout.queued import QueuedCollector
from rlhpc.rollout.requests import Sampling, Task, blank_draft, first_samples, share_of
from rlhpc.rollout.schedule.response_order import ExpectedLengths, interval_of, turn_of
from rlhpc.rollout.tools import ToolUse
from rlhpc.trainer.dealer import Dealer
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

    def dealer(
        self, state: RunState, sampling: Sampling, ratio: Callable[[int], float] = lambda _: 1.0, mean: float = 0.0
    ) -> Dealer:
        """Collects responses of all engines. ``ratio`` by group and ``mean``: see ``ExpectedLengths``; 0: not known."""
        mean = mean or sampling.max_tokens / 4
        way = self.section.dealing
        slots = self.section.sequences if way != "equal" else sys.maxsize
        rules = Rules(slots, turn_of(mean) if way == "turns" else None, pinned=self.tools is not None)
        collector = QueuedCollector(
            self.engine, sampling, self.reward_workers, state.policy_version, self.tools, slots=slots
        )
        return Dealer(collector, self.place, rules, ExpectedLengths(ratio, mean), interval_of(mean))

    def statistics(self) -> dict[str, float]:
        """Those of the engine since the last call, on its first rank only."""
        found = self.engine.statistics()
        return found if self.place.leads else {}

    def answers(
        self, state: RunState, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling
    ) -> list[Scored]:
        """Samples of the prompts, in their order, whose places are the group ids; equal on every rank. A dropped sample
        has a reward of 0. They have no routed experts: these samples are not trained on. Collective."""
        firsts = first_samples([prompt.prompt_id for prompt in prompts], samples_per_prompt)
        dealer, engines = self.dealer(state, sampling), self.place.engines
        dealer.begin(
            [
                Task(place, index, prompts[place], blank_draft(prompts[place], state.policy_version, place), root)
                for place in self.place.own(len(prompts))
                for index in range(samples_per_prompt)
                for root in [(self.seed, state.step, prompts[place].prompt_id, firsts[place] + index)]
            ],
            most=samples_per_prompt * max(len(share_of(len(prompts), engines, engine)) for engine in range(engines)),
        )
        dealer.advance()
        mine = without_routed_experts(dealer.collector.harvest())
        found = [scored for part in gather_objects(mine if self.place.leads else None) for scored in part or ()]
        return sorted(found, key=lambda scored: (scored.group, scored.index))

"""This rank's share of a rollout: its engine's prompts, answered and scored."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.api import Prompt, RunState
from rlhpc.rollout.collect import Collector, Scored
from rlhpc.rollout.requests import Sampling, Task, blank_draft, first_samples, share_of
from rlhpc.trainer.build import Run
from rlhpc.trainer.routed_experts import without_routed_experts


def make_collector(run: Run, state: RunState, temperature: float) -> Collector:
    """Of this rank's engine, which is awake with the actor's weights."""
    section = run.config.rollout
    sampling = Sampling(section.max_response_tokens, temperature, section.top_p if temperature > 0 else 1.0)
    return Collector(run.engine, sampling, run.reward_workers, state.policy_version, run.tools)


def generate_samples(
    run: Run, state: RunState, prompts: Sequence[Prompt], samples_per_prompt: int, temperature: float
) -> list[Scored]:
    """Samples of the prompts that this rank's engine answers, in the prompts' order, whose places are the group ids;
    none on other ranks than the engine's first. One whose reward failed so that it is left out has a reward of 0.
    Nobody trains on them: they have no routed experts. The engine is awake with the actor's weights."""
    firsts = first_samples([prompt.prompt_id for prompt in prompts], samples_per_prompt)
    collector = make_collector(run, state, temperature)
    collector.begin(
        [
            Task(place, index, prompts[place], blank_draft(prompts[place], state.policy_version, place), root)
            for place in share_of(len(prompts), run.num_engines, run.engine_index)
            for index in range(samples_per_prompt)
            for root in [(run.config.seed, state.step, prompts[place].prompt_id, firsts[place] + index)]
        ]
    )
    collector.advance()
    return without_routed_experts(collector.harvest())

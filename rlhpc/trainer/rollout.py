"""This rank's share of a rollout: its engine's prompts, answered and scored."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.api import Prompt, RunState, Sample
from rlhpc.rollout.collect import Sampling, collect
from rlhpc.trainer.build import Run


def generate_samples(
    run: Run, state: RunState, prompts: Sequence[Prompt], samples_per_prompt: int, temperature: float
) -> list[Sample]:
    """Samples of the prompts that this rank's engine answers. The engine is awake with the actor's weights."""
    section = run.config.rollout
    sampling = Sampling(
        samples_per_prompt=samples_per_prompt,
        max_tokens=section.max_response_tokens,
        temperature=temperature,
        top_p=section.top_p if temperature > 0 else 1.0,
        seed=run.config.seed,
        step=state.step,
    )
    return collect(
        run.engine,
        prompts,
        sampling,
        engine_index=run.engine_index,
        num_engines=run.num_engines,
        weights_version=state.weights_version,
        score=run.score,
    )

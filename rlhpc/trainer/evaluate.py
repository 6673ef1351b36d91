"""Validation on held-out prompts with the present weights."""

from __future__ import annotations

import json

import numpy as np

from rlhpc.api import RunState, Sample
from rlhpc.core.heartbeat import touch
from rlhpc.trainer.batches import exchange_samples
from rlhpc.trainer.build import Run
from rlhpc.trainer.rollout import generate_samples

Metrics = dict[str, float]


def validate(run: Run, state: RunState) -> Metrics:
    """One response to each held-out prompt; accuracy is the mean reward. Leaves the engine asleep."""
    section = run.config.validation
    prompts = run.validation.prompts[: section.max_prompts]
    touch("validation", state.step)
    with run.weights:
        state.weights_version = run.weights.weights_version
        samples = exchange_samples(
            run, generate_samples(run, state, prompts, samples_per_prompt=1, temperature=section.temperature)
        )
    if run.info.rank == 0:
        _keep(run, state, samples)
    return {
        "validation/accuracy": float(np.mean([sample.reward for sample in samples])),
        "validation/response_length": float(np.mean([sample.response_len for sample in samples])),
    }


def _keep(run: Run, state: RunState, samples: list[Sample]) -> None:
    """Append the first few samples, in words, to samples.jsonl."""
    prompts = {prompt.prompt_id: prompt for prompt in run.validation.prompts}
    run.context.attempt.check_current()
    with open(run.folder.samples, "a", encoding="utf-8") as file:
        for sample in samples[: run.config.observe.samples]:
            record = {
                "step": state.step,
                "prompt": run.tokenizer.decode(sample.tokens[: sample.prompt_len]),
                "response": run.tokenizer.decode(sample.tokens[sample.prompt_len :]),
                "expected": prompts[sample.prompt_id].ground_truth,
                "reward": sample.reward,
                "truncated": sample.truncated,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

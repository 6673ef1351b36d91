"""Held-out prompts answered with the present weights: in the course of training, and as a run of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.api import Prompt, RunState, Sample
from rlhpc.config.schema import ModelSection
from rlhpc.core.files import LineFile, read_json, write_atomic, write_json
from rlhpc.core.heartbeat import touch
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.evaluation import Answer, evaluation_metrics
from rlhpc.observe.report import write_evaluation
from rlhpc.trainer.batches import exchange_samples
from rlhpc.trainer.build import Run
from rlhpc.trainer.reward_model import score_by_model
from rlhpc.trainer.rollout import generate_samples

Metrics = dict[str, float]


@dataclass(frozen=True)
class Answered:
    """One response to a held-out prompt."""

    set_name: str
    prompt: Prompt
    sample: Sample


def validate(run: Run, state: RunState) -> Metrics:
    """``validation/…`` metrics of the present weights; the first samples are kept. Leaves the engine asleep."""
    answered = _answer(run, state)
    if run.info.rank == 0:
        run.context.attempt.check_current()
        LineFile(run.folder.samples).append("".join(_lines(run, state, answered[: run.config.observe.samples])))
    return {f"validation/{name}": value for name, value in _metrics(run, answered).items()}


def evaluate(run: Run) -> None:
    """Answer the held-out prompts once, and write samples.jsonl, metrics.json and the report."""
    state = _state_of(run.config.model)
    answered = _answer(run, state)
    if run.info.rank:
        return
    run.context.attempt.check_current()
    write_atomic(run.folder.samples, "".join(_lines(run, state, answered)))
    metrics = _metrics(run, answered)
    model = run.config.model
    write_json(
        run.folder.evaluation,
        {
            "model": str(model.weights or model.path),
            "step": state.step,
            "prompts": len({answer.sample.group_id for answer in answered}),
            "samples_per_prompt": run.config.validation.samples_per_prompt,
            "temperature": run.config.validation.temperature,
            "metrics": metrics,
        },
    )
    with ShownOnly("the report"):
        write_evaluation(run.folder, metrics)


def _answer(run: Run, state: RunState) -> list[Answered]:
    """Equal on every rank, in the prompts' order."""
    section = run.config.validation
    chosen = run.validation.first(section.max_prompts)
    prompts = [prompt for _, prompt in chosen]
    touch("validation", state.step)
    with run.weights:
        state.policy_version = run.weights.policy_version
        mine = generate_samples(run, state, prompts, section.samples_per_prompt, section.temperature)
        samples = exchange_samples(run, [scored.sample for scored in mine])
    return [Answered(*chosen[sample.group_id], sample) for sample in _judged(run, samples)]


def _judged(run: Run, samples: list[Sample]) -> list[Sample]:
    """With the reward model's part, if there is one; a response that would be left out of training counts as 0."""
    if run.models.reward is None:
        return samples
    scored_samples, _ = score_by_model(run, samples, run.validation)
    return [
        replace(sample, reward=0.0, reward_parts={}, answer=None) if scored is None else scored
        for sample, scored in zip(samples, scored_samples, strict=True)
    ]


def _metrics(run: Run, answered: list[Answered]) -> Metrics:
    answers = [
        Answer(
            answer.sample.group_id,
            answer.set_name,
            answer.prompt.data_source,
            answer.sample.reward,
            answer.sample.response_len,
            answer.sample.truncated,
            answer.sample.answer,
        )
        for answer in answered
    ]
    return evaluation_metrics(answers, run.config.validation.success)


def _lines(run: Run, state: RunState, answered: list[Answered]) -> list[str]:
    """Samples in words, one JSON object each."""
    return [json.dumps(_record(run, state, answer), ensure_ascii=False) + "\n" for answer in answered]


def _record(run: Run, state: RunState, answer: Answered) -> dict[str, Any]:
    sample = answer.sample
    return {
        "step": state.step,
        "set": answer.set_name,
        "source": answer.prompt.data_source,
        "prompt": run.tokenizer.decode(sample.tokens[: sample.prompt_len]),
        "response": run.tokenizer.decode(sample.tokens[sample.prompt_len :]),
        "expected": answer.prompt.ground_truth,
        "answer": sample.answer,
        "reward": sample.reward,
        "parts": sample.reward_parts,
        "correct": sample.reward >= run.config.validation.success,
        "truncated": sample.truncated,
    }


def _state_of(model: ModelSection) -> RunState:
    """Of the checkpoint whose weights are used, so that what is drawn is what its run drew; else the first one."""
    known = (model.weights or Path()).parent / "state.json"
    if model.weights is None or not known.is_file():
        return RunState()
    state = read_json(known)["state"]
    return RunState(step=state["step"], sft_step=state["sft_step"])

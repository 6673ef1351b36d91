"""Held-out prompts answered with the present weights: during training, and as a run of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.api import Prompt, RunState, Sample, TrainBackend
from rlhpc.config.schema import ModelSection, RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.errors import NonFiniteError
from rlhpc.core.files import LineFile, read_json, write_atomic, write_json
from rlhpc.core.heartbeat import touch
from rlhpc.core.shown import ShownOnly
from rlhpc.data.prompts import PromptSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.observe.evaluation import ScoredResponse, evaluation_metrics
from rlhpc.observe.report import write_evaluation
from rlhpc.reshard.manager import ReshardManager
from rlhpc.rollout.requests import sampling_of
from rlhpc.trainer.reward_model import RewardModel, counted_as_zero
from rlhpc.trainer.rollout import Rollout

Metrics = dict[str, float]


@dataclass(frozen=True)
class Answered:
    """One response to a held-out prompt."""

    set_name: str
    prompt: Prompt
    sample: Sample


def check_finite_weights(models: Mapping[str, TrainBackend], state: RunState) -> None:
    """Refuses to validate or save weights that are not finite, which an optimizer or a device may cause although the
    gradients are finite. Collective."""
    for name, model in models.items():
        if not model.has_finite_weights():
            phase, step = ("rl", state.step) if state.step else ("sft", state.sft_step)
            place = f"after {phase} step {step}" if state.total_steps else "before the first step"
            raise NonFiniteError(
                f"the weights of the {name} are not finite {place} and are neither validated nor saved; check the "
                f"weights at model.path, the optimizer's function and rate and the devices, and resume the run"
            )


@dataclass
class Evaluator:
    """Answers the held-out prompts. Its methods are collective and leave the engine asleep.

    Without ``rollout`` and ``weights`` engines on ranks of their own answer them, and only ``record`` can be called.
    """

    config: RunConfig
    context: RankContext
    prompts: PromptSet
    tokenizer: Tokenizer
    rollout: Rollout | None
    weights: ReshardManager | None
    reward_model: RewardModel | None

    def validate(self, actor: TrainBackend, state: RunState) -> Metrics:
        """``validation/…`` metrics of the present weights; writes the first samples."""
        check_finite_weights({"actor": actor}, state)
        return self.record(state, self._samples(state))

    def record(self, state: RunState, samples: list[Sample]) -> Metrics:
        """The same of responses to all prompts, which the weights of ``state`` sampled; equal on every rank, in the
        prompts' order."""
        answered = self._scored(samples)
        if self.context.info.rank == 0:
            self.context.attempt.check_current()
            lines = self._lines(state, answered[: self.config.observe.samples])
            LineFile(self.context.run.samples).append("".join(lines))
        return {f"validation/{name}": value for name, value in self._metrics(answered).items()}

    def evaluate(self) -> None:
        """Answers the held-out prompts once, and writes samples.jsonl, metrics.json and the report."""
        model, section, folder = self.config.model, self.config.validation, self.context.run
        state = _state_of(model)
        answered = self._scored(self._samples(state))
        if self.context.info.rank:
            return
        self.context.attempt.check_current()
        write_atomic(folder.samples, "".join(self._lines(state, answered)))
        metrics = self._metrics(answered)
        write_json(
            folder.evaluation,
            {
                "model": str(model.weights or model.path),
                "step": state.step,
                "prompts": len({answer.sample.group_id for answer in answered}),
                "samples_per_prompt": section.samples_per_prompt,
                "temperature": section.temperature,
                "metrics": metrics,
            },
        )
        with ShownOnly("the report"):
            write_evaluation(folder, metrics)

    @property
    def asked(self) -> list[tuple[str, Prompt]]:
        """The held-out prompts with their sets."""
        return self.prompts.first(self.config.validation.max_prompts)

    def _samples(self, state: RunState) -> list[Sample]:
        """Equal on every rank, in the prompts' order."""
        assert self.rollout is not None, "engines on ranks of their own answer"
        assert self.weights is not None
        section = self.config.validation
        sampling = sampling_of(self.config.rollout, section.temperature, section.sampling)
        prompts = [prompt for _, prompt in self.asked]
        touch("validation", state.step)
        with self.weights:
            answers = self.rollout.answers(state, prompts, section.samples_per_prompt, sampling)
        return [scored.sample for scored in answers]

    def _scored(self, samples: list[Sample]) -> list[Answered]:
        asked = self.asked
        return [Answered(*asked[sample.group_id], sample) for sample in self._scored_by_model(samples)]

    def _scored_by_model(self, samples: list[Sample]) -> list[Sample]:
        """With the reward model's part, if there is one; a response that training would drop counts as 0."""
        if self.reward_model is None:
            return samples
        scored_samples, _ = self.reward_model.score(samples, self.prompts)
        return [
            counted_as_zero(sample) if scored is None else scored
            for sample, scored in zip(samples, scored_samples, strict=True)
        ]

    def _metrics(self, answered: list[Answered]) -> Metrics:
        answers = [
            ScoredResponse(
                answer.sample.group_id,
                answer.set_name,
                answer.prompt.data_source,
                answer.sample.reward,
                answer.sample.sampled_len,
                answer.sample.truncated,
                answer.sample.answer,
            )
            for answer in answered
        ]
        return evaluation_metrics(answers, self.config.validation.success)

    def _lines(self, state: RunState, answered: list[Answered]) -> list[str]:
        """Samples as text, one JSON object each."""
        return [json.dumps(self._record(state, answer), ensure_ascii=False) + "\n" for answer in answered]

    def _record(self, state: RunState, answer: Answered) -> dict[str, Any]:
        sample = answer.sample
        return {
            "step": state.step,
            "set": answer.set_name,
            "source": answer.prompt.data_source,
            "prompt": self.tokenizer.decode(sample.tokens[: sample.prompt_len].tolist()),
            "response": self.tokenizer.decode(sample.tokens[sample.prompt_len :].tolist()),
            "expected": answer.prompt.ground_truth,
            "answer": sample.answer,
            "reward": sample.reward,
            "parts": sample.reward_parts,
            "correct": sample.reward >= self.config.validation.success,
            "truncated": sample.truncated,
        }


def _state_of(model: ModelSection) -> RunState:
    """State of the checkpoint whose weights are used, so that sampling repeats that of its run; else a new one."""
    known = (model.weights or Path()).parent / "state.json"
    if model.weights is None or not known.is_file():
        return RunState()
    state = read_json(known)["state"]
    return RunState(step=state["step"], sft_step=state["sft_step"])

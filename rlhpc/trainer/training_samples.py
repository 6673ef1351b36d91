"""The samples that a step trained on, as rows of text and numbers in the run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhpc.api import Prompt, Sample
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.shown import ShownOnly
from rlhpc.data.tokenizer import Tokenizer, response_messages
from rlhpc.observe.training_samples import PART, SHARE, Row, SampleFiles, forget_steps
from rlhpc.rollout.tool_parsers import Parser
from rlhpc.trainer.roles import PerSample

_MOST_EXPECTED = 4096  # characters of a ground truth, which may be a list of many tests


class TrainingSamples:
    """Keeps the samples of the first step and of every n-th one. Only the first rank writes."""

    def __init__(self, config: RunConfig, context: RankContext, texts: SampleTexts | None, last_step: int) -> None:
        """Removes the samples of steps after ``last_step``, which are taken again."""
        self._section, self._success = config.observe.training_samples, config.validation.success
        self._texts, self._files = texts, None
        self._guard = ShownOnly("samples of training steps")
        if context.info.rank:
            return
        with self._guard:
            forget_steps(context.run, last_step)
            if self._section is not None and self._section.every:
                self._files = SampleFiles(context.attempt, self._section.max_mib << 20)

    def step(self, step: int, samples: Sequence[Sample], advantages: PerSample, before: PerSample | None) -> None:
        """Keeps the samples of a step, if it is due. ``before``: the trainer's log-probs, if they are known."""
        section, texts = self._section, self._texts
        if self._files is None or section is None or texts is None or (step % section.every and step != 1):
            return
        with self._guard:
            rows = SampleRows(texts, self._success, (section.max_mib << 20) // SHARE)
            self._files.write(step, rows.of(step, samples, advantages, before))

    def close(self) -> None:
        """Waits for the file that is being written."""
        if self._files is not None:
            self._files.close()


@dataclass(frozen=True)
class SampleTexts:
    """Sources of texts: the policy's tokenizer, and the prompts by number. ``parse``: parser of calls, if the policy
    has tools."""

    tokenizer: Tokenizer
    prompt: Callable[[int], Prompt]
    parse: Parser | None = None


@dataclass(frozen=True)
class SampleRows:
    """A step's samples as rows. A response is correct if its reward is at least ``success``; the groups after
    ``most_characters`` of text are left out."""

    texts: SampleTexts
    success: float
    most_characters: int

    def of(self, step: int, samples: Sequence[Sample], advantages: PerSample, before: PerSample | None) -> list[Row]:
        """The rows, in the order of the samples, with whole groups only."""
        found: dict[int, list[Row]] = {}
        size = 0
        for row in self._rows(samples, advantages, before):
            row["step"] = step
            size += sum(len(value) for value in row.values() if isinstance(value, str))
            if size > self.most_characters and found:
                found.pop(row["group_id"], None)
                break
            found.setdefault(row["group_id"], []).append(row)
        return sorted((row for rows in found.values() for row in rows), key=lambda row: int(row["sample"]))

    def _rows(
        self, samples: Sequence[Sample], advantages: PerSample, before: PerSample | None
    ) -> Iterator[dict[str, Any]]:
        known: dict[int, dict[str, Any]] = {}  # prompts
        for place in sorted(range(len(samples)), key=lambda place: samples[place].group_id):
            sample = samples[place]
            if sample.prompt_id not in known:
                known[sample.prompt_id] = self._prompt(sample)
            numbers = _numbers(sample, advantages[place], None if before is None else before[place])
            yield {"sample": place, **known[sample.prompt_id], **self._response(sample), **numbers}

    def _prompt(self, sample: Sample) -> dict[str, Any]:
        prompt = self.texts.prompt(sample.prompt_id)
        truth = prompt.ground_truth
        expected = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)
        text = self.texts.tokenizer.decode(sample.tokens[: sample.prompt_len].tolist())
        return {"source": _whole(prompt.data_source), "prompt": _whole(text), "expected": _whole(_cut(expected))}

    def _response(self, sample: Sample) -> dict[str, Any]:
        text = self.texts.tokenizer.decode(sample.tokens[sample.prompt_len :].tolist())
        parse = self.texts.parse
        messages = response_messages(self.texts.tokenizer, sample) if parse else []
        own = [one["content"] for one in messages if one["role"] == "assistant"]
        return {
            "response": _whole(text),
            "messages": _whole(json.dumps(messages, ensure_ascii=False)) if messages else None,
            "answer": None if sample.answer is None else _whole(sample.answer),
            "correct": sample.reward >= self.success,
            "turns": len(own) or 1,
            "tool_calls": sum(len(parse(text)) for text in own) if parse else 0,
            **{PART + _whole(name): value for name, value in sample.reward_parts.items()},
        }


def _numbers(sample: Sample, advantages: np.ndarray, before: np.ndarray | None) -> Row:
    """The sample's own numbers, over the tokens trained on. ``before``: the trainer's log-probs."""
    mask = sample.response_mask if sample.trained_len else np.zeros(sample.response_len, bool)
    engine = sample.log_probs if mask is None else sample.log_probs[mask]
    advantages = advantages if mask is None else advantages[mask]
    found: dict[str, Any] = {
        "group_id": sample.group_id,
        "prompt_id": sample.prompt_id,
        "reward": sample.reward,
        "prompt_length": sample.prompt_len,
        "response_length": sample.sampled_len,
        "trained_tokens": len(engine),
        "tool_tokens": sample.tool_tokens,
        "truncated": sample.truncated,
        "policy_version": sample.policy_version,
    }
    if not len(engine):
        return found
    found |= {"logprob_mean": float(engine.mean(dtype=np.float64)), "logprob_min": float(engine.min())}
    found |= {
        "advantage": float(advantages.mean(dtype=np.float64)),
        "advantage_min": float(advantages.min()),
        "advantage_max": float(advantages.max()),
    }
    if before is not None:
        trainer = before if mask is None else before[mask]
        found["logprob_diff_mean"] = float(np.abs(trainer - engine).mean(dtype=np.float64))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_EXPECTED else text[:_MOST_EXPECTED] + " …"


def _whole(text: str) -> str:
    """The text without lone surrogates, which JSON can have and a Parquet file cannot."""
    return text.encode("utf-8", "replace").decode()

"""Scores of a step's samples by a reward model, which is cut over the ranks like any other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlhpc.api import Sample
from rlhpc.data.collate import pack_batch
from rlhpc.data.prompts import PromptSet
from rlhpc.parallel.transfer import gather_parts
from rlhpc.plan.checks.rewards import MODEL_PART
from rlhpc.rewards.calls import Failure
from rlhpc.sharding.dispatch import SPLIT_BY_DATA
from rlhpc.trainer.batches import filled
from rlhpc.trainer.build import Run
from rlhpc.trainer.roles import Role


def score_by_model(
    run: Run, samples: Sequence[Sample], prompts: PromptSet | None
) -> tuple[list[Sample | None], Counter[str]]:
    """The samples with the model's number for their last token, weighted, added to their rewards, and the model's
    failures by kind; ``prompts`` are those that the samples answer. None for a sample that is left out, because the
    number is not finite. Collective."""
    role = run.models.reward
    if role is None or not samples:
        return list(samples), Counter()
    scores = _scores(run, role, samples, prompts)
    scored = [_scored(run, sample, score, prompts) for sample, score in zip(samples, scores, strict=True)]
    return scored, Counter("result" for score in scores if not math.isfinite(score))


def _scores(run: Run, role: Role, samples: Sequence[Sample], prompts: PromptSet | None) -> list[float]:
    lacking = max(0, role.layout.dp - len(samples))  # each of its ranks needs a sample
    tokens = run.reward_reader.read([*samples, *samples[:1] * lacking], prompts)
    (plan,) = role.pack([len(ids) for ids in tokens], gradient=False)
    batches = filled(
        role.own_bins(plan, run.info.rank),
        lambda ids: pack_batch([(tokens[i], len(tokens[i])) for i in ids], sample_ids=ids),
    )
    mine: dict[int, float] = {}
    for batch, stats in zip(batches, role.model.values(batches), strict=True):
        last = stats.values[batch.cu_seqlens[1:].long() - 1][: len(batch.sample_ids)]
        mine.update(zip(batch.sample_ids, last.tolist(), strict=True))
    role.model.offload()
    found = {i: score for part in gather_parts(SPLIT_BY_DATA, role.layout, mine) for i, score in part.items()}
    return [found[i] for i in range(len(samples))]


def _scored(run: Run, sample: Sample, score: float, prompts: PromptSet | None) -> Sample | None:
    section = run.config.reward.model
    if not math.isfinite(score):
        failures, prompt = run.reward_reader.failures, prompts.numbered(sample.prompt_id)
        text = run.tokenizer.decode(sample.tokens[sample.prompt_len :].tolist())
        failure, where = Failure("result", f"returned {score}"), f"reward.model {section.path}"
        if failures.handle(where, failure, prompt, text, log=run.info.rank == 0):
            return None
        score = 0.0
    parts = {**sample.reward_parts, MODEL_PART: score}
    return replace(sample, reward=sample.reward + section.weight * score, reward_parts=parts)

"""Scores of a step's samples by a reward model, which is cut over the ranks like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhpc.api import Sample
from rlhpc.data.collate import pack_batch
from rlhpc.parallel.transfer import gather_parts
from rlhpc.plan.transfer import SPLIT_BY_DATA
from rlhpc.trainer.build import Run

PART = "model"  # its part of a reward, by name


def score_by_model(run: Run, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the model's number for their last token, weighted, added to their rewards. Collective."""
    role = run.models.reward
    if role is None or not samples:
        return list(samples)
    (plan,) = role.pack([len(sample.tokens) for sample in samples], gradient=False)
    batches = [
        pack_batch([(samples[i].tokens, samples[i].prompt_len) for i in ids], sample_ids=ids)
        for ids in role.own_bins(plan, run.info.rank)
    ]
    mine: dict[int, float] = {}
    for batch, stats in zip(batches, role.model.values(batches), strict=True):
        last = stats.values[batch.cu_seqlens[1:].long() - 1]
        mine.update(zip(batch.sample_ids, last.tolist(), strict=True))
    role.model.offload()
    scores = {i: score for part in gather_parts(SPLIT_BY_DATA, role.layout, mine) for i, score in part.items()}
    weight = run.config.reward.model.weight
    return [
        replace(
            sample, reward=sample.reward + weight * scores[i], reward_parts={**sample.reward_parts, PART: scores[i]}
        )
        for i, sample in enumerate(samples)
    ]

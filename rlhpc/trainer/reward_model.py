"""Scores samples by a reward model, which is sharded over the ranks like any other model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhpc.api import Sample
from rlhpc.data.collate import pack_batch
from rlhpc.data.prompts import PromptSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.parallel.transfer import gather_parts
from rlhpc.plan.checks.rewards import MODEL_PART
from rlhpc.rewards.calls import Failure
from rlhpc.sharding.dispatch import SPLIT_BY_DATA
from rlhpc.trainer.batches import filled
from rlhpc.trainer.reward_reader import RewardReader
from rlhpc.trainer.roles import Role


@dataclass
class RewardModel:
    """A reward model and what it reads of a sample."""

    role: Role
    reader: RewardReader
    tokenizer: Tokenizer  # the policy's

    def score(self, samples: Sequence[Sample], prompts: PromptSet | None) -> list[Sample | None]:
        """The samples with the model's weighted score of their last token added to their rewards; ``prompts`` are the
        ones they answer. None for a sample to drop because its score is not finite. Collective."""
        if not samples:
            return []
        scores = self._scores(samples, prompts)
        return [self._scored(sample, score, prompts) for sample, score in zip(samples, scores, strict=True)]

    def _scores(self, samples: Sequence[Sample], prompts: PromptSet | None) -> list[float]:
        role = self.role
        lacking = max(0, role.layout.dp - len(samples))  # each data-parallel rank needs a sample
        tokens = self.reader.read([*samples, *[samples[0]] * lacking], prompts)
        (plan,) = role.pack([len(ids) for ids in tokens], gradient=False)
        batches = filled(
            role.own_bins(plan),
            lambda ids: pack_batch([(tokens[i], len(tokens[i])) for i in ids], sample_ids=ids),
        )
        mine: dict[int, float] = {}
        for batch, stats in zip(batches, role.model.values(batches), strict=True):
            last = stats.values[batch.cu_seqlens[1:].long() - 1][: len(batch.sample_ids)]
            mine.update(zip(batch.sample_ids, last.tolist(), strict=True))
        role.model.offload()
        found = {i: score for part in gather_parts(SPLIT_BY_DATA, role.layout, mine) for i, score in part.items()}
        return [found[i] for i in range(len(samples))]

    def _scored(self, sample: Sample, score: float, prompts: PromptSet | None) -> Sample | None:
        section = self.reader.section
        if not math.isfinite(score):
            assert prompts is not None, "a failure is reported with its prompt"
            failures, source = self.reader.failures, prompts.numbered(sample.prompt_id).data_source
            text = self.tokenizer.decode(sample.tokens[sample.prompt_len :].tolist())
            failure, where = Failure("result", f"returned {score}"), f"reward.model {section.path}"
            if failures.handle(where, failure, sample.prompt_id, source, text, log=self.role.rank == 0):
                return None
            score = 0.0
        parts = {**sample.reward_parts, MODEL_PART: score}
        return replace(sample, reward=sample.reward + section.weight * score, reward_parts=parts)

"""Scores samples by a reward model, which is sharded over the ranks like any other model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

from rlhpc.api import Sample
from rlhpc.data.collate import pack_batch
from rlhpc.data.prompts import PromptSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.rewards.calls import Failure
from rlhpc.trainer.batches import filled
from rlhpc.trainer.reward_reader import RewardReader
from rlhpc.trainer.roles import Judges, Role


def counted_as_zero(sample: Sample) -> Sample:
    """An answer to a held-out prompt that training would drop."""
    return replace(sample, reward=0.0, reward_parts={}, answer=None)


@dataclass
class RewardModel:
    """A reward model and what it reads of a sample. ``model``: its role on this rank, or the judges that have it."""

    model: Role | Judges
    reader: RewardReader
    tokenizer: Tokenizer  # the policy's
    lengths: list[int] = field(default_factory=list)  # tokens of each sequence that it read last

    def score(
        self, samples: Sequence[Sample], prompts: PromptSet | None, *, stays: bool = False
    ) -> tuple[list[Sample | None], Counter[str]]:
        """The samples with the model's weighted score of their last token added to their rewards, and its failures by
        kind (``unrendered``: scored without a part of its text); ``prompts`` are the ones they answer. None for a
        sample to drop because its score is not finite. ``stays``: the weights are not offloaded afterwards. Collective.
        """
        failures: Counter[str] = Counter()
        self.lengths = []
        if not samples:
            return [], failures
        scored: list[Sample | None] = []
        scores = self._scores(samples, prompts)
        if self.reader.unrendered:
            failures["unrendered"] = self.reader.unrendered
        if not stays:
            self.offload()
        for sample, score in zip(samples, scores, strict=True):
            if not math.isfinite(score):
                failure = Failure("result", f"returned {score}")
                failures[failure.kind] += 1
                if self._drops(sample, failure, prompts):
                    scored.append(None)
                    continue
                score = 0.0
            parts = {**sample.reward_parts, self.reader.section.name: score}
            reward = sample.reward + self.reader.section.weight * score
            scored.append(replace(sample, reward=reward, reward_parts=parts))
        return scored, failures

    def offload(self) -> None:
        """Moves the weights off the device, if these ranks have them."""
        if isinstance(self.model, Role):
            self.model.model.offload()

    def _scores(self, samples: Sequence[Sample], prompts: PromptSet | None) -> list[float]:
        conversations = self.reader.read(samples, prompts)
        self.lengths = [len(tokens) for tokens in conversations]
        if isinstance(self.model, Role):
            return scores_of(self.model, conversations)
        return self.model.scores(conversations)

    def _drops(self, sample: Sample, failure: Failure, prompts: PromptSet | None) -> bool:
        """True if a failure drops the sample; otherwise its score is 0."""
        assert prompts is not None, "a failure is reported with its prompt"
        text = self.tokenizer.decode(sample.tokens[sample.prompt_len :].tolist())
        rank = self.model.rank if isinstance(self.model, Role) else dist.get_rank()
        where, log = f"{self.reader.key}.model {self.reader.section.model}", rank == 0
        return self.reader.failures.handle(where, failure, prompts.numbered(sample.prompt_id), text, log=log)


def scores_of(role: Role, conversations: Sequence[np.ndarray]) -> list[float]:
    """Scores of the conversations' last tokens by a reward model on these ranks. Collective."""
    lacking = max(0, role.layout.dp - len(conversations))  # each data-parallel rank needs one
    tokens = [*conversations, *[conversations[0]] * lacking]
    (plan,) = role.pack([len(ids) for ids in tokens], gradient=False)
    batches = filled(
        role.own_bins(plan),
        lambda ids: pack_batch([(tokens[i], len(tokens[i])) for i in ids], sample_ids=ids),
    )
    mine: dict[int, float] = {}
    for batch, stats in zip(batches, role.model.values(batches), strict=True):
        last = stats.values[batch.cu_seqlens[1:].long() - 1][: len(batch.sample_ids)]
        mine.update(zip(batch.sample_ids, last.tolist(), strict=True))
    found = role.gathered(mine)
    return [found[i] for i in range(len(conversations))]

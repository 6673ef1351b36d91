"""Tokens that a reward model reads of a sample: the policy's, or the conversation by its own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rlhpc.api import Sample
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.data import DataSection
from rlhpc.config.reward import RewardModelSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.data.chat_template import Chat
from rlhpc.data.prompts import PromptSet
from rlhpc.data.tokenizer import Tokenizer, response_messages, whole_conversation
from rlhpc.parallel.transfer import gather_objects
from rlhpc.plan.checks.rewards import most_tokens, uses_own_tokenizer
from rlhpc.rewards.failures import Failures

_REMEDY = "look at the model and its weights, or set reward_workers.on_failure"


@dataclass
class RewardReader:
    """Prepares samples for a reward model, whose config key is ``key``, such as rewards.0.

    ``own`` is the reward model's tokenizer, None if it reads the policy's tokens; ``most`` its maximum tokens;
    ``padding`` its padding token, at which transformers never scores; ``failures`` handles scores that are not finite.
    ``alone``: a rank encodes all conversations itself, because others read others.
    """

    key: str
    section: RewardModelSection
    policy: Tokenizer | None
    own: Tokenizer | None
    most: int
    padding: int | None
    failures: Failures
    alone: bool = False
    unrendered: int = 0  # responses of the last read whose text the chat template leaves out in part

    @classmethod
    def of(cls, config: RunConfig, policy: Tokenizer | None, *, alone: bool = False) -> RewardReader | None:
        """As configured; None without a reward model."""
        section = config.reward_model
        if section is None:
            return None
        shape = resolve_model(config, section.model, classifier=True)
        own = _tokenizer(config, section, shape.vocab_size) if uses_own_tokenizer(config) else None
        failures = Failures(config.reward_workers, _REMEDY)
        most, key = most_tokens(config, section, shape), config.reward_model_key
        return cls(key, section, policy, own, most, _padding(section.model), failures, alone)

    def read(self, samples: Sequence[Sample], prompts: PromptSet | None) -> list[np.ndarray]:
        """int32 tokens of each sample, up to the one to score; ``prompts`` are those that the samples answer, with
        their texts. Collective over the whole job, unless alone."""
        self.unrendered = 0
        if self.own is None:
            found = [sample.tokens if self.policy is None else self.policy.disarmed(sample) for sample in samples]
        else:
            assert prompts is not None, "another tokenizer encodes the prompts' texts"
            found = self._encoded(self.own, samples, prompts)
        return [self._fitting(self._to_last(tokens)) for tokens in found]

    def _encoded(self, own: Tokenizer, samples: Sequence[Sample], prompts: PromptSet) -> list[np.ndarray]:
        """Each rank encodes a part of them, unless alone."""
        assert self.policy is not None, "responses are decoded by the policy's tokenizer"
        ranks, rank = (1, 0) if self.alone else (dist.get_world_size(), dist.get_rank())
        conversations = []
        for sample in samples[rank::ranks]:
            text = prompts.numbered(sample.prompt_id).text
            assert text is not None, "prompts are loaded with their texts"
            response = response_messages(self.policy, sample)
            conversations.append(Chat(whole_conversation(text, response), sampled=len(response)))
        before = own.template.unrendered if own.template else 0
        try:
            encoded = own.encode_conversations(conversations)
        except UserError as error:
            raise UserError(error.message, where=f"{self.key}.chat_template", remedy=error.remedy) from None
        mine = (
            [np.array(ids, dtype=np.int32) for ids in encoded],
            (own.template.unrendered if own.template else 0) - before,
        )
        shares = [mine] if self.alone else [share for share in gather_objects(mine) if share is not None]
        self.unrendered = sum(unrendered for _, unrendered in shares)
        parts = [part for part, _ in shares]
        return [parts[i % ranks][i // ranks] for i in range(len(samples))]

    def _to_last(self, tokens: np.ndarray) -> np.ndarray:
        """Without padding tokens at the end, which a chat template may write."""
        if self.padding is None:
            return tokens
        words = np.flatnonzero(tokens != self.padding)
        return tokens[: words[-1] + 1 if len(words) else 1]

    def _fitting(self, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) <= self.most:
            return tokens
        if self.section.too_long == "error":
            raise UserError(
                f"a conversation has {len(tokens)} tokens for the reward model, which reads {self.most}",
                where=f"{self.key}.max_tokens",
                remedy=f"set {self.key}.too_long to truncate, or lower rollout.max_response_tokens",
            )
        return tokens[-self.most :]


def _tokenizer(config: RunConfig, section: RewardModelSection, vocab_size: int) -> Tokenizer:
    """The reward model's, with the policy's system prompt."""
    words = DataSection(
        chat_template=section.chat_template,
        system_prompt=config.data.system_prompt,
        template_time=config.data.template_time,
    )
    try:
        return Tokenizer.load(section.model, vocab_size, words)
    except UserError as error:
        where = f"{config.reward_model_key}.chat_template" if error.where == "data.chat_template" else error.where
        raise UserError(error.message, where=where, remedy=error.remedy) from None


def _padding(folder: Path) -> int | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("pad_token_id")
    return None if found is None else int(found)

"""Prompts for RL and validation, in the schema that users of other RL trainers already have.

A row's columns: ``data_source`` (a name that rewards may choose by), ``prompt`` (chat messages, or a plain text),
``reward_model`` ({"ground_truth": …}); ``extra_info`` is optional, further columns are not looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.api import Prompt
from rlhpc.config.schema import DataSection
from rlhpc.core.errors import UserError
from rlhpc.data.files import Order, Row, check_messages, need, read_rows
from rlhpc.data.tokenizer import Text, Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts. ``dropped`` counts those left out for their length."""

    prompts: tuple[Prompt, ...]
    dropped: int
    order: Order

    @classmethod
    def load(cls, paths: Sequence[Path], section: DataSection, tokenizer: Tokenizer, where: str) -> PromptSet:
        """Read and tokenize files; ``where`` is the config key that names them."""
        rows = [row for index, path in enumerate(paths) for row in read_rows(path, f"{where}.{index}")]
        if not rows:
            raise UserError("holds no prompts", where=where, remedy="name files with at least one row")
        token_lists = tokenizer.encode_prompts([_prompt_of(row, place) for place, row in rows])
        limit = f"data.max_prompt_tokens {section.max_prompt_tokens}"
        prompts = []
        for number, ((place, row), tokens) in enumerate(zip(rows, token_lists, strict=True)):
            if _is_short(tokens, section, place):
                prompts.append(_make_prompt(number, row, tokens, place))
        if not prompts:
            raise UserError(
                f"all {len(rows)} prompts are longer than {limit}",
                where=where,
                remedy="raise data.max_prompt_tokens",
            )
        dropped = len(rows) - len(prompts)
        if dropped:
            _log.warning("%s: %d of %d prompts dropped, longer than %s", where, dropped, len(rows), limit)
        return cls(tuple(prompts), dropped, Order(len(prompts), section.shuffle))

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, cursor: int, count: int, seed: int) -> tuple[list[Prompt], int]:
        """The next ``count`` prompts and the new cursor; the same for the same arguments, in every process."""
        indices, cursor = self.order.take(cursor, count, seed)
        return [self.prompts[i] for i in indices], cursor


def _prompt_of(row: Row, place: str) -> Text:
    prompt = need(row, "prompt", place)
    return prompt if isinstance(prompt, str) else check_messages(prompt, "prompt", place)


def _is_short(tokens: Sequence[int], section: DataSection, place: str) -> bool:
    """The prompt may be used; a longer one is an error unless those are to be dropped. So is one without tokens."""
    if not tokens:
        raise UserError("the prompt has no tokens", where=place, remedy="remove the row")
    limit = section.max_prompt_tokens
    if len(tokens) > limit and section.overlong_prompts == "error":
        raise UserError(
            f"the prompt has {len(tokens)} tokens, data.max_prompt_tokens is {limit}",
            where=place,
            remedy="raise data.max_prompt_tokens, or set data.overlong_prompts to drop",
        )
    return len(tokens) <= limit


def _make_prompt(number: int, row: Row, tokens: tuple[int, ...], place: str) -> Prompt:
    reward_model: Any = need(row, "reward_model", place)
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise UserError(
            f"column 'reward_model' is {reward_model!r:.80}", where=place, remedy='write it as {"ground_truth": …}'
        )
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise UserError(f"column 'extra_info' is {extra_info!r:.80}", where=place, remedy="write it as {…}")
    return Prompt(number, tokens, str(need(row, "data_source", place)), reward_model["ground_truth"], extra_info)

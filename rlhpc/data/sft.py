"""Supervised examples: rows with ``messages`` (the last one is learnt), or ``prompt`` and ``response``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhpc.core.errors import UserError
from rlhpc.data.files import Order, Row, check_asks, check_messages, need, read_rows
from rlhpc.data.tokenizer import Text, Tokenizer, with_tools

Example = tuple[np.ndarray, int]  # tokens int32 [prompt + response], prompt length


@dataclass(frozen=True)
class SFTSet:
    """Tokenized examples; each response is closed by an end token."""

    sequences: tuple[Example, ...]
    order: Order

    @classmethod
    def load(cls, paths: Sequence[Path], tokenizer: Tokenizer, where: str = "sft.data") -> SFTSet:
        """Read and tokenize files; ``where`` is the config key that names them."""
        rows = [row for index, path in enumerate(paths) for row in read_rows(path, f"{where}.{index}")]
        if not rows:
            raise UserError("holds no examples", where=where, remedy="name files with at least one row")
        pairs = [_split(row, place) for place, row in rows]
        prompts = tokenizer.encode_prompts([prompt for prompt, _ in pairs])
        responses = tokenizer.encode_responses([response for _, response in pairs])
        sequences = []
        for (place, _), prompt, response in zip(rows, prompts, responses, strict=True):
            if not prompt:
                raise UserError("the prompt has no tokens", where=place, remedy="remove the row")
            sequences.append((np.array(prompt + response, dtype=np.int32), len(prompt)))
        return cls(tuple(sequences), Order(len(sequences)))

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, cursor: int, count: int, seed: int) -> tuple[list[Example], int]:
        """The next ``count`` examples and the new cursor; the same for the same arguments, in every process."""
        indices, cursor = self.order.take(cursor, count, seed)
        return [self.sequences[i] for i in indices], cursor


def _split(row: Row, place: str) -> tuple[Text, str]:
    """Prompt, with the row's tools, and response."""
    prompt, response = _prompt_and_response(row, place)
    return with_tools(prompt, row, place), response


def _prompt_and_response(row: Row, place: str) -> tuple[str | list[Row], str]:
    if row.get("messages") is not None:
        messages = check_messages(row["messages"], "messages", place)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError(
                "the messages do not end with an assistant's answer to something",
                where=place,
                remedy='end them with {"role": "assistant", "content": "…"}',
            )
        return messages[:-1], messages[-1]["content"]
    if "prompt" not in row and "response" not in row:
        raise UserError(
            "neither a column 'messages' nor 'prompt' and 'response'",
            where=place,
            remedy=f"add them; the row has {', '.join(repr(name) for name in row) or 'no columns'}",
        )
    prompt, response = need(row, "prompt", place), need(row, "response", place)
    if not isinstance(response, str):
        raise UserError(f"column 'response' is {response!r:.80}", where=place, remedy="write it as a text")
    if isinstance(prompt, str):
        return prompt, response
    return check_asks(check_messages(prompt, "prompt", place), "prompt", place), response

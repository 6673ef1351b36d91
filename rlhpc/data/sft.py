"""Supervised examples: rows with ``messages`` (the last one is the response), or ``prompt`` and ``response``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhpc.core.errors import UserError
from rlhpc.data.files import Order, Row, check_messages, check_open, need, read_rows
from rlhpc.data.prompts import Readers, tokenize
from rlhpc.data.tokenizer import Text, Tokenizer, with_tools

Example = tuple[np.ndarray, int]  # tokens int32 [prompt + response], prompt length


@dataclass
class SFTSet:
    """Tokenized examples; each response ends with an end token."""

    sequences: tuple[Example, ...]
    order: Order

    @classmethod
    def load(
        cls,
        paths: Sequence[Path],
        tokenizer: Tokenizer,
        longest: int | None = None,
        where: str = "sft.data",
        readers: Readers | None = None,
    ) -> SFTSet:
        """Reads and tokenizes files; ``where`` is the config key that names them, ``longest`` the model's positions."""
        rows = [row for index, path in enumerate(paths) for row in read_rows(path, f"{where}.{index}")]
        if not rows:
            raise UserError("holds no examples", where=where, remedy="name files with at least one row")
        pairs = [_split(row, place) for place, row in rows]
        shared = (readers or Readers(), where, "examples", "give all nodes the same files")
        prompts = tokenize([prompt for prompt, _ in pairs], tokenizer.encode_prompts, *shared)
        responses = tokenize([response for _, response in pairs], tokenizer.encode_responses, *shared)
        sequences = []
        for (place, _), prompt, response in zip(rows, prompts, responses, strict=True):
            if not len(prompt):
                raise UserError("the prompt has no tokens", where=place, remedy="remove the row")
            if longest is not None and len(prompt) + len(response) > longest:
                raise UserError(
                    f"the example has {len(prompt) + len(response)} tokens, but the model has {longest} positions",
                    where=place,
                    remedy="shorten or remove the row",
                )
            sequences.append((np.concatenate([prompt, response]), len(prompt)))
        return cls(tuple(sequences), Order(len(sequences)))

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, cursor: int, count: int, seed: int) -> tuple[list[int], int]:
        """Indices of the next ``count`` examples and the new cursor. Determined by the arguments."""
        return self.order.take(cursor, count, seed)


def _split(row: Row, place: str) -> tuple[Text, str]:
    """Prompt, with the row's tools, and response of a row."""
    prompt, response = _prompt_and_response(row, place)
    return with_tools(prompt, row, place), response


def _prompt_and_response(row: Row, place: str) -> tuple[str | list[Row], str]:
    if row.get("messages") is not None:
        messages = check_messages(row["messages"], "messages", place)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError(
                "the messages do not end with an assistant's response",
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
    return check_open(check_messages(prompt, "prompt", place), "prompt", place), response

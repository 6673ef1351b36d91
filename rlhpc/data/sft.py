"""Supervised examples: rows with ``messages`` (the last one is the response), or ``prompt`` and ``response``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhpc.config.schema import SFTSection
from rlhpc.core.errors import UserError
from rlhpc.data.chat_template import Chat
from rlhpc.data.files import Order, Row, check_messages, check_open, need, read_rows
from rlhpc.data.prompts import Readers, tokenize
from rlhpc.data.tokenizer import Tokenizer, as_messages, with_tools


@dataclass(frozen=True)
class Example:
    """A conversation as the chat template renders it, of which the tokens in ``trained`` are trained on."""

    tokens: np.ndarray  # int32 [tokens]
    prompt_len: int  # tokens before the first trained one
    trained: np.ndarray  # bool [tokens - prompt_len]


@dataclass
class SFTSet:
    """Tokenized examples."""

    sequences: tuple[Example, ...]
    order: Order

    @classmethod
    def load(
        cls, section: SFTSection, tokenizer: Tokenizer, longest: int | None = None, readers: Readers | None = None
    ) -> SFTSet:
        """Reads and tokenizes the section's files; ``longest`` is the model's number of positions."""
        where = "sft.data"
        rows = [row for index, path in enumerate(section.data) for row in read_rows(path, f"{where}.{index}")]
        if not rows:
            raise UserError("holds no examples", where=where, remedy="name files with at least one row")
        chats = [with_tools(_messages(row, place), row, place) for place, row in rows]
        encode = functools.partial(tokenizer.encode_examples, every=section.train_on == "all_turns")
        shared = (readers or Readers(), where, "examples", "give all nodes the same files")
        found = zip(chats, tokenize(chats, encode, *shared), strict=True)
        sequences = tuple(_example(coded, chat, longest) for chat, coded in found)
        return cls(sequences, Order(len(sequences)))

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, cursor: int, count: int, seed: int) -> tuple[list[int], int]:
        """Indices of the next ``count`` examples and the new cursor. Determined by the arguments."""
        return self.order.take(cursor, count, seed)


def _example(coded: np.ndarray, chat: Chat, longest: int | None) -> Example:
    """The example of ``Tokenizer.encode_examples``; a UserError if it cannot be trained on."""
    trained = np.flatnonzero(coded < 0)
    if not len(trained):
        raise UserError("no token is trained on", where=chat.place, remedy="remove the row")
    if not trained[0]:
        raise UserError("the prompt has no tokens", where=chat.place, remedy="remove the row")
    if longest is not None and len(coded) > longest:
        raise UserError(
            f"the example has {len(coded)} tokens, but the model has {longest} positions",
            where=chat.place,
            remedy="shorten or remove the row",
        )
    tokens = np.where(coded < 0, -1 - coded, coded).astype(np.int32)
    return Example(tokens, int(trained[0]), coded[trained[0] :] < 0)


def _messages(row: Row, place: str) -> list[Any]:
    """The conversation of a row, which ends with the response."""
    if row.get("messages") is not None:
        messages = check_messages(row["messages"], "messages", place)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError(
                "the messages do not end with an assistant's response",
                where=place,
                remedy='end them with {"role": "assistant", "content": "…"}',
            )
        return messages
    if "prompt" not in row and "response" not in row:
        raise UserError(
            "neither a column 'messages' nor 'prompt' and 'response'",
            where=place,
            remedy=f"add them; the row has {', '.join(repr(name) for name in row) or 'no columns'}",
        )
    prompt, response = need(row, "prompt", place), need(row, "response", place)
    if not isinstance(response, str):
        raise UserError(f"column 'response' is {response!r:.80}", where=place, remedy="write it as a text")
    if not isinstance(prompt, str):
        check_open(check_messages(prompt, "prompt", place), "prompt", place)
    return [*as_messages(prompt), {"role": "assistant", "content": response}]

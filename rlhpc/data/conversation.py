"""A response as chat messages: turns of the policy and answers of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhpc.api import Sample
from rlhpc.data.tokenizer import Messages, Tokenizer

Message = dict[str, Any]


def response_messages(tokenizer: Tokenizer, sample: Sample) -> list[Message]:
    """The response as messages: turns of the policy with the role assistant, answers of tools with the role tool.

    A response whose tokens are all masked (``train.mask_truncated``) is one turn.
    """
    response = sample.tokens[sample.prompt_len :]
    if sample.response_mask is None or not sample.response_mask.any():
        return [{"role": "assistant", "content": tokenizer.decode(response)}]
    messages: list[Message] = []
    for of_policy, part in split_turns(sample):
        if of_policy:
            messages.append({"role": "assistant", "content": tokenizer.decode(part)})
        else:
            messages += [{"role": "tool", "content": answer} for answer in tokenizer.tool_answers(part.tolist())]
    return messages


def split_turns(sample: Sample) -> list[tuple[bool, np.ndarray]]:
    """(sampled by the policy, tokens) of each turn of the response, and of the tools' answers between turns."""
    response = sample.tokens[sample.prompt_len :]
    if sample.response_mask is None:
        return [(True, response)]
    edges = np.flatnonzero(np.diff(sample.response_mask)) + 1
    starts = [0, *edges.tolist()]
    return [(bool(sample.response_mask[i]), part) for i, part in zip(starts, np.split(response, edges), strict=True)]


def whole_conversation(prompt: str | Messages, response: Sequence[Message]) -> list[Message]:
    """Messages of prompt and response; a prompt that ends in an assistant's message is continued by the first turn."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1]["role"] == "assistant":
        first, *response = response
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + first["content"]}
    return [*messages, *response]

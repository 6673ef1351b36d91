"""A response in the words of its conversation: what the policy said, and what tools answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhpc.api import Sample
from rlhpc.data.tokenizer import Messages, Tokenizer

Message = dict[str, Any]


def response_messages(tokenizer: Tokenizer, sample: Sample) -> list[Message]:
    """The response as messages: a turn of the policy has the role assistant, each answer of a tool the role tool.

    A response of which every token is masked (``train.mask_truncated``) is one turn.
    """
    response = sample.tokens[sample.prompt_len :]
    if sample.response_mask is None or not sample.response_mask.any():
        return [{"role": "assistant", "content": tokenizer.decode(response)}]
    messages: list[Message] = []
    for of_policy, part in spoken(sample):
        if of_policy:
            messages.append({"role": "assistant", "content": tokenizer.decode(part)})
        else:
            messages += [{"role": "tool", "content": answer} for answer in tokenizer.tool_answers(part.tolist())]
    return messages


def spoken(sample: Sample) -> list[tuple[bool, np.ndarray]]:
    """(whether the policy chose them, tokens) of the response's turns and of what it was told between them."""
    response = sample.tokens[sample.prompt_len :]
    if sample.response_mask is None:
        return [(True, response)]
    edges = np.flatnonzero(np.diff(sample.response_mask)) + 1
    starts = [0, *edges.tolist()]
    return [(bool(sample.response_mask[i]), part) for i, part in zip(starts, np.split(response, edges), strict=True)]


def whole_conversation(prompt: str | Messages, response: Sequence[Message]) -> list[Message]:
    """Prompt and response; a prompt that ends in the model's own words goes on in them."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1]["role"] == "assistant":
        first, *response = response
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + first["content"]}
    return [*messages, *response]

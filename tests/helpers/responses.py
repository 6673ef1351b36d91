"""Tokens of responses as a policy samples them."""

from __future__ import annotations

from rlhpc.data.tokenizer import Tokenizer


def encode_response(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of a turn of the assistant, with the token that ends it."""
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": text}]
    (coded,) = tokenizer.encode_examples([messages])
    return tuple(-1 - token for token in coded if token < 0)

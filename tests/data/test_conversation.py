"""Responses as messages: turns of the policy, and answers of tools."""

from __future__ import annotations

import numpy as np
import pytest

from rlhpc.api import Sample
from rlhpc.config.data import DataSection
from rlhpc.data.tokenizer import Tokenizer, response_messages, split_turns, whole_conversation
from tests.helpers.responses import encode_response
from tests.rollout.tool_task import CALLS, make_tokenizer

ASKS = {"role": "user", "content": "1+1="}
ANSWERS = [{"role": "assistant", "content": "3"}, {"role": "tool", "content": "4"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    inner = make_tokenizer()
    return Tokenizer(inner, (inner.eos_token_id,), DataSection())


def make_sample(*parts: tuple[int, ...], given: bool | None) -> Sample:
    """Response to a prompt of two tokens. ``given``: every second part is masked; False: all are; None: no mask."""
    response = [token for part in parts for token in part]
    response_mask = [place % 2 == 0 for place, part in enumerate(parts) for _ in part]
    return Sample(
        prompt_id=0,
        group_id=0,
        tokens=np.array([1, 2, *response], np.int32),
        prompt_len=2,
        log_probs=np.zeros(len(response), np.float32),
        reward=0.0,
        policy_version=0,
        truncated=False,
        response_mask=None if given is None else np.array(response_mask) & given,
    )


def test_turns_and_answers_are_distinguished(tokenizer: Tokenizer) -> None:
    turn, last = (encode_response(tokenizer, text) for text in (CALLS[0], "49"))
    parts = (turn, tokenizer.tool_turn(["42", "7"])[1:], last)  # the policy sampled the end of its turn itself
    sample = make_sample(*parts, given=True)
    assert [(of_policy, tuple(part)) for of_policy, part in split_turns(sample)] == list(
        zip((True, False, True), parts, strict=True)
    )
    assert response_messages(tokenizer, sample) == [
        {"role": "assistant", "content": CALLS[0]},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "49"},
    ]


@pytest.mark.parametrize("given", [None, False])
def test_a_response_without_a_known_or_trained_token_is_one_turn(tokenizer: Tokenizer, given: bool | None) -> None:
    response = encode_response(tokenizer, "49")
    sample = make_sample(response, given=given)
    ((of_policy, part),) = split_turns(sample)
    assert (of_policy, tuple(part)) == (given is None, response)
    assert response_messages(tokenizer, sample) == [{"role": "assistant", "content": "49"}]


def test_a_final_assistant_message_is_continued() -> None:
    begun = [ASKS, ANSWERS[0], ASKS, {"role": "assistant", "content": "2"}]
    assert whole_conversation("1+1=", ANSWERS) == whole_conversation([ASKS], ANSWERS) == [ASKS, *ANSWERS]
    assert whole_conversation(begun, ANSWERS) == [
        *begun[:-1],
        {"role": "assistant", "content": "23"},
        ANSWERS[1],
    ]
    assert begun[-1]["content"] == "2"

"""Which samples a condition, an order and a comparison of two steps choose."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.observe.sample_choice import columns, in_order, is_wrong, pairs, read_conditions


def record(prompt: str, reward: float, response: str, length: int, **changes: Any) -> dict[str, Any]:
    fields = {"prompt": prompt, "reward": reward, "correct": reward == 1, "response": response, "parts": {}}
    return {**fields, "response_length": length, "answer": None, **changes}


RECORDS = [
    record("a", 1.0, "Because", 3, parts={"format": 0.5}),
    record("b", 0.25, "so", 30),
    record("c", math.nan, "or", 7, parts={"format": 0}),
]


def selected(*texts: str) -> str:
    """Prompts of the samples that all conditions hold for."""
    conditions = read_conditions(texts, RECORDS)
    return "".join(one["prompt"] for one in RECORDS if all(condition.holds(one) for condition in conditions))


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("reward < 0.5", "b"),
        ("reward>=0.25", "ab"),
        ("reward != 1", "bc"),
        ("reward == 1e0", "a"),
        ("reward/format = 0", "c"),
        ("reward/format != 0", "ab"),  # b has none
        ("length <= 7", "ac"),
        ("correct = TRUE", "a"),
        ("correct != true", "bc"),
        ("response ~ because", "a"),
        ("response !~ 'o'", "a"),
        ('response = "so"', "b"),
        ("reward > 0 and length > 7", "b"),
    ],
)
def test_a_condition_compares_by_the_column_s_kind(text: str, prompts: str) -> None:
    assert selected(text) == prompts


def test_all_conditions_must_hold() -> None:
    assert selected("reward > 0", "correct = false") == "b"
    assert selected() == "abc"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward", r"'reward' is not a condition; write a column"),
        ("__import__('os') < 1", r"no column \"__import__\('os'\)\"; valid: "),
        ("rewad < 1", "no column 'rewad'; did you mean 'reward'"),
        ("reward < much", "reward is a number; compare it with one"),
        ("reward ~ 1", "reward is a number; compare it with one"),
        ("response < 1", "response is a text; compare it with = != ~"),
        ("correct < true", "correct is true or false; write correct = true"),
        ("correct = yes", "correct is true or false; write correct = true"),
    ],
)
def test_a_wrong_condition_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"--where: {message}"):
        read_conditions([text], RECORDS)


def test_an_order_ends_with_what_has_no_value() -> None:
    def order(column: str) -> str:
        return "".join(record["prompt"] for record in in_order(RECORDS, column))

    assert [order(name) for name in ("reward", "-reward", "-length", "response")] == ["bac", "abc", "bca", "acb"]
    with pytest.raises(UserError, match="--sort: no column 'lenth'; did you mean"):
        order("lenth")
    assert {"reward/format", "prompt"} <= {*columns(RECORDS)} - {"parts"}


def test_pairs_are_the_common_prompts_from_the_largest_loss_to_the_largest_gain() -> None:
    def step(**rewards: float) -> list[dict[str, Any]]:
        return [{"prompt": name[0], "prompt_id": 1, "reward": reward} for name, reward in rewards.items()]

    found = pairs(step(a=0.0, b=1.0, b2=0.5, c=1.0), step(d=0.0, b=0.5, a=1.0, a2=0.5))
    assert [(pair.before[0]["prompt"], pair.change, len(pair.before)) for pair in found] == [
        ("b", -0.25, 2),
        ("a", 0.75, 1),
    ]


def test_a_sample_without_a_verdict_is_wrong_without_a_reward() -> None:
    assert [is_wrong(record) for record in ({"reward": 0.0}, {"reward": 0.1}, {"reward": 1, "correct": False})] == [
        True,
        False,
        True,
    ]

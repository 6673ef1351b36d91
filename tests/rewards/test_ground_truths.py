"""Ground truths are checked by the functions themselves, in the reward workers."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.api import UnusableTruth
from tests.rewards.scoring import HERE, LIMIT

pytestmark = pytest.mark.workers


def truths(*values: Any) -> list[tuple[str, Any]]:
    return [("sums", value) for value in values]


def test_the_first_ground_truth_that_a_function_refuses_is_found(make: Any) -> None:
    reward_workers = make(function="rlhpc.rewards.rules:maths")
    assert reward_workers.unusable_truths(truths(*range(100), "x^2")) == []
    values = [*map(str, range(70)), " ", "1", r"\boxed{", "2"]
    maths = "rlhpc.rewards.rules:maths"
    found = [UnusableTruth(index, maths, "math-verify cannot read it", "error") for index in (70, 72)]
    assert reward_workers.unusable_truths(truths(*values, *range(100), "")) == found
    reward_workers = make(function=maths, on_failure="drop")
    assert reward_workers.unusable_truths(truths(*values))[0].action == "drop"


def test_a_function_s_own_check_receives_its_arguments_and_is_bounded_in_time(make: Any) -> None:
    """One without a check, one that refuses, one that hangs at a ground truth."""
    functions = [
        {"name": "plain", "function": f"{HERE}:tokens"},
        {"name": "own", "function": f"{HERE}:with_check", "arguments": {"least": 3}, "time_limit_seconds": LIMIT},
    ]
    reward_workers = make(functions=functions)
    own = f"{HERE}:with_check"
    assert reward_workers.unusable_truths(truths(3, 4, 2, 1)) == [
        UnusableTruth(index, own, "it is below 3", "error") for index in (2, 3)
    ]
    found, _ = reward_workers.unusable_truths(truths(3, "not a number", 1))
    assert (found.index, found.action) == (1, "error")
    assert found.what.startswith("raised TypeError: ")
    hung, refused = reward_workers.unusable_truths(truths(3, "hang", 1))
    assert hung == UnusableTruth(1, own, f"took more than {LIMIT:g} s", "zero")
    assert refused == UnusableTruth(2, own, "it is below 3", "error")

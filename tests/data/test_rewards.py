"""The built-in rewards, and how a user's function is called and checked."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Prompt
from rlhpc.config.schema import RewardSection
from rlhpc.core.errors import UserError
from rlhpc.data.rewards import exact, last_boxed, load_reward, maths, number

RESULTS: dict[str, Any] = {
    "float": 0.25,
    "bool": True,
    "numpy": np.float32(0.5),
    "numpy bool": np.bool_(True),
    "dict": {"score": 2, "note": "x"},
    "nan": float("nan"),
    "infinite": {"score": float("inf")},
    "text": "1.0",
    "none": None,
    "other dict": {"reward": 1.0},
}


def chosen(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    return RESULTS[solution_str]


def plus(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], more: float) -> float:
    return more + len(solution_str) + extra_info["index"]


def raising(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return 1 / 0


PROMPT = Prompt(12, (1,), "sums", "3", {"index": 100})


def score(function: str, response: str, **arguments: Any) -> float:
    path = f"tests.data.test_rewards:{function}"
    return load_reward(RewardSection(function=path, arguments=arguments))(PROMPT, response)


@pytest.mark.parametrize(
    ("kind", "value"), [("float", 0.25), ("bool", 1), ("numpy", 0.5), ("numpy bool", 1), ("dict", 2)]
)
def test_numbers_of_every_kind_are_taken(kind: str, value: float):
    result = score("chosen", kind)
    assert result == value
    assert type(result) is float


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("nan", "returned nan"),
        ("infinite", "returned inf"),
        ("text", r"returned '1.0' \(str\)"),
        ("none", r"returned None \(NoneType\)"),
        ("other dict", r"returned {'reward': 1.0} \(dict\)"),
    ],
)
def test_what_is_not_a_finite_number_names_function_and_sample(kind: str, told: str):
    with pytest.raises(
        UserError,
        match=rf"^reward.function tests.data.test_rewards:chosen: {told} for prompt 12 of 'sums', response '{kind}'",
    ):
        score("chosen", kind)


def test_an_exception_names_type_message_and_sample():
    with pytest.raises(
        UserError, match=r"raised ZeroDivisionError: division by zero for prompt 12 of 'sums'"
    ) as caught:
        score("raising", "x" * 200)
    assert "'" + "x" * 80 + "'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_arguments_of_the_config_reach_the_function():
    assert score("plus", "ab", more=0.5) == 102.5


def test_arguments_that_do_not_fit_are_refused_before_the_run():
    with pytest.raises(UserError, match=r"reward.arguments: .*plus cannot be called .*unexpected.*'less'"):
        score("plus", "ab", more=0.5, less=0.5)
    with pytest.raises(UserError, match=r"reward.function: .*missing a required argument: 'more'"):
        score("plus", "ab")


def test_what_is_no_function_is_refused():
    with pytest.raises(UserError, match=r"reward.function: .*:RESULTS' is not a function"):
        score("RESULTS", "ab")


@pytest.mark.parametrize(
    ("truth", "response", "value"),
    [
        (r"\frac{1}{2}", r"so it is \boxed{0.5}", 1),
        ("42", "6 times 7 is 42.", 1),
        ("42", r"\boxed{41}", 0),
        ("3", r"first \boxed{3}, no: \boxed{5}", 0),
        ("5", r"first \boxed{3}, no: \boxed{5}", 1),
        ("5", r"\boxed{5} of 7", 1),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1),
        (r"\boxed{7}", "7", 1),
        (7, "7", 1),
        ("7", "", 0),
        ("7", "no idea", 0),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
    ],
)
def test_maths_judges_by_value(truth: Any, response: str, value: float):
    assert maths("", response, truth, {}) == value


def test_maths_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(maths("", "the answer is 58", "58", {})))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_an_unreadable_ground_truth_is_an_error():
    with pytest.raises(ValueError, match="cannot read the ground truth ''"):
        maths("", "5", "", {})


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}} end}") == r"\boxed{\frac{1}{2}}"
    assert last_boxed(r"\boxed{1") is None
    assert last_boxed("1") is None


def test_exact_and_number():
    assert exact("", " 58\n", "58", {}) == 1
    assert exact("", "058", "58", {}) == 0
    assert number("", "47+38 is 85", 85, {}) == 1
    assert number("", "-085", "-85", {}) == 1
    assert number("", "85 or 86", "85", {}) == 0
    assert number("", "", "85", {}) == 0

"""What a function's result is taken for, and what is wrong with a function before it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.rewards.calls import Entry, Failure, Score, load_function
from tests.rewards import functions
from tests.rewards.functions import RESULTS

KEYWORDS = {
    "data_source": "sums",
    "ground_truth": "3",
    "extra_info": {"index": 100},
    "response_tokens": 7,
    "max_response_tokens": 9,
}


def call(function: str, response: str, **arguments: Any) -> Score | Failure:
    loaded = load_function(Entry(f"tests.rewards.functions:{function}", arguments, "rewards.0.function"))
    return loaded({**KEYWORDS, "solution_str": response})


@pytest.mark.parametrize(("kind", "value"), [("float", 0.25), ("bool", 1), ("numpy", 0.5), ("numpy bool", 1)])
def test_numbers_of_every_kind_are_taken(kind: str, value: float):
    score = call("selected", kind)
    assert score == Score(value)
    assert type(score.value) is float


def test_further_numbers_of_an_object_are_parts():
    assert call("selected", "dict") == Score(2.0, {"words": 3.0, "good": 1.0})
    assert call("selected", "too large a part") == Score(1.0)


def test_an_object_may_tell_the_answer():
    assert call("telling", "so it is 4") == Score(1.0, {"words": 4.0}, answer="4")
    assert call("telling", "") == Score(1.0, {"words": 0.0}, answer="")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("nan", "returned nan"),
        ("infinite", "returned inf"),
        ("too large", "returned inf"),
        ("text", "returned '1.0' (str)"),
        ("none", "returned None (NoneType)"),
        ("numpy array", "returned array([0., 0.]) (ndarray)"),
        ("other dict", "returned {'reward': 1.0} (dict)"),
    ],
)
def test_what_is_no_finite_number_is_a_failure(kind: str, what: str):
    assert call("selected", kind) == Failure("result", what)
    assert kind in RESULTS


def test_an_exception_is_reported_with_its_place():
    failure = call("does", "raise")
    assert failure.kind == "raised"
    assert failure.what.startswith("raised ZeroDivisionError: division by zero (/")
    lines = Path(functions.__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if "lambda: 1 / 0" in text)
    assert failure.what.endswith(f"/functions.py:{line})")
    assert call("does", "exit").what.startswith("raised SystemExit: 4")
    assert call("does", "raise in silence").what.startswith("raised Silent: (no text) (")


def test_arguments_of_the_config_reach_the_function():
    assert call("plus", "ab", more=0.5) == Score(102.5)


def test_numbers_of_tokens_reach_a_function_that_asks_for_them():
    assert call("tokens", "ab") == Score(7, {"most": 9})


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"rewards.0.arguments: .*plus cannot be called .*unexpected.*'less'"):
        call("plus", "ab", more=0.5, less=0.5)
    with pytest.raises(UserError, match=r"rewards.0.function: .*missing a required argument: 'more'"):
        call("plus", "ab")


def test_what_is_no_function_is_refused():
    with pytest.raises(UserError, match=r"rewards.0.function: .*:NOT_A_FUNCTION' is not a function"):
        call("NOT_A_FUNCTION", "ab")

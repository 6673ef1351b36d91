"""The built-in rules."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from typing import Any

import pytest

from rlhpc.rewards import rules
from rlhpc.rewards.calls import Entry, load_function
from rlhpc.rewards.rules import boxed, exact, last_boxed, maths, number


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


def test_math_verify_logs_no_response(caplog, monkeypatch):
    """It would log each whole as it warns that it has no time limit of its own, and what it cannot read."""
    monkeypatch.setattr("math_verify.parser.TIMEOUT_WARNING_SHOWN", False)
    with caplog.at_level(logging.DEBUG):
        assert maths("", "not 42: 1 " + "1 " * 50_000, "42", {}) == 0
    assert not [record for record in caplog.records if record.name.startswith("math_verify")]


def test_maths_reads_the_end_of_a_long_response():
    assert maths("", "so $x = 5$ " * 1000 + "the answer is $7$", "7", {}) == 1
    assert maths("", "the answer is 7.\n" + "it is not $1$ and $2$.\n" * 1000, "7", {}) == 0
    assert maths("", r"\boxed{7}" + " so it is" * 1000, "7", {}) == 1
    assert maths("", r"\boxed{7" + " " * 5000 + "}", "7", {}) == 0, "a box of thousands of characters is not read"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{2^{3^{4}}}", "2^{3^{4}}"),
        (r"\boxed{x^{1/2}+\sqrt{2}}", "sqrt(x) + sqrt(2)"),
        (r"\boxed{x^{\sqrt{2}}}", "x**(sqrt(2))"),
        ("1e400", "1"),
        (r"\boxed{\binom{20000}{10000}}", r"\binom{20000}{10000}"),  # Python writes no number of 6,020 digits
    ],
)
def test_an_answer_that_sympy_cannot_write_is_reported_as_it_is_written(response: str, answer: str):
    assert load(maths)(response) == answer


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


def test_a_number_of_thousands_of_digits_is_no_error():
    assert number("", "9" * 5000, "85", {}) == 0


@pytest.mark.parametrize(
    ("truth", "response", "value"),
    [
        (r"\frac{1}{2}", r"so \boxed{\frac{1} {2}}", 1),
        ("1/2", r"\boxed{0.5}", 0),
        ("5", r"\boxed{3}, no: \boxed{5}", 1),
        ("5", "5", 0),
        (5, r"\boxed{5}", 1),
    ],
)
def test_boxed_compares_letters(truth: Any, response: str, value: float):
    assert boxed("", response, truth, {}) == value


@pytest.mark.parametrize("seed", range(3))
def test_plain_ground_truths_are_those_that_math_verify_reads(seed: int):
    """It is not asked about them."""
    draw, count = random.Random(seed), 0
    pieces = [*"12xa{}{} \n-+.,%_&()[]=/<|", "x^{12}", "a^2", "0", "oo", "1/0", "9" * 60]
    pieces += [r"\frac{1}{", r"\sqrt{", r"\text{", r"\pi", "\\"]
    while count < 60:
        text = "".join(draw.choices(pieces, k=draw.choice([1, 2, 3, 5, 8])))
        if rules.is_plain(text):
            count += 1
            assert rules.read_truth(text), text
    odd = [
        "",
        "-",
        r"\text{}",
        "5^{5^{5}}",
        "x^2^2",
        "2^9",
        "x^{999}",
        "}{",
        "{1",
        r"\boxed{1}",
        r"1\}",
        "٣",
        "3!",
        "$3$",
    ]
    for text in (*odd, "9" * 201):
        assert not rules.is_plain(text), text
    for text in ("-12.5", r"\frac{1}{2}", "(1, 2]", "x^2 + 3x", r"3\sqrt{2}", "1,000", "no", r"\text{no}", "12%"):
        assert rules.is_plain(text), text


@pytest.mark.parametrize(
    ("rule", "usable", "unusable", "quickly"),
    [
        (maths, ["4", r"\frac{1}{2}", "x^2", "?", 7, r"so \boxed{3}"], ["", " \n", "$ $", r"\boxed{", "'"], 3),
        (number, ["4", 4, " -7\n", 4.5], ["", "4.5", "four", [4], float("inf")], 5),
    ],
)
def test_unusable_ground_truths_are_found_by_the_check(rule: Any, usable: list[Any], unusable: list[Any], quickly: int):
    for truth in usable:
        rule.check_ground_truth(data_source="", ground_truth=truth)
        rule.quick_check(data_source="", ground_truth=truth)
        rule("", "1", truth, {})
    for index, truth in enumerate(unusable):
        with pytest.raises(ValueError, match=r"^(it is|math-verify cannot)"):
            rule.check_ground_truth(data_source="", ground_truth=truth)
        with pytest.raises((ValueError, TypeError, OverflowError)):
            rule("", "1", truth, {})
        with pytest.raises(ValueError, match=r"^it is") if index < quickly else contextlib.nullcontext():
            rule.quick_check(data_source="", ground_truth=truth)


@pytest.mark.parametrize(
    ("rule", "alike", "other"),
    [
        (maths, [r"so \boxed{\frac{1}{2}}", "it is 1/2", r"\boxed{0.5}", r"\boxed{0.50}"], "it is 1/3"),
        (maths, [r"\boxed{x^2}", r"\boxed{x^{2}}"], r"\boxed{x^3}"),
        (boxed, [r"\boxed{a b}", r"so \boxed{ab}"], r"\boxed{ba}"),
        (number, ["it is 7", "1 + 6 = 07."], "-7"),
        (exact, ["7", " 7\n"], "7."),
    ],
)
def test_equal_answers_are_equal_texts(rule: Any, alike: list[str], other: str):
    answers = {load(rule)(text) for text in alike}
    assert len(answers) == 1
    assert answers != {load(rule)(other)} != {""}


@pytest.mark.parametrize(("rule", "text"), [(maths, "no idea"), (boxed, "7"), (number, "seven"), (exact, " ")])
def test_no_answer_is_reported_too(rule: Any, text: str):
    assert load(rule)(text) == ""


def load(rule: Any) -> Any:
    """What a worker takes for a response's answer."""
    call = load_function(Entry(f"rlhpc.rewards.rules:{rule.__name__}", {}, "rewards.0.function"))
    known = {"data_source": "", "ground_truth": "7", "extra_info": {}}
    return lambda text: call({**known, "solution_str": text}).answer

"""Windows, conditions, and when a rule fires again."""

from __future__ import annotations

import functools
import math
import random
import statistics
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.observe.alerts.rules import Engine, MetricCondition, Rule, Threshold, Window, WindowValues, parse_condition

STEP = Window()


def rule(text: str, window: Window = STEP) -> Rule:
    return Rule("rule", functools.partial(Threshold, "x", parse_condition(text), window), window)


def steps(engine: Engine, values: list[Any], first: int = 1, seconds: float = 60.0, phase: str = "rl") -> list[int]:
    """Steps at which the rule fires; None is a step without the metric."""
    found = []
    for step, value in enumerate(values, first):
        record = {"phase": phase, "step": step, "time": seconds * step, **({} if value is None else {"x": value})}
        if engine.add(record):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("> 0.5", [0.5, 0.6, 0.7, 0.5, 0.6], [2, 5]),
        (">= 0.5", [0.4, 0.5], [2]),
        ("< -1e-3", [0.0, -0.01], [2]),
        ("<=.5", [1, 0.5], [2]),
        ("non-finite", [1.0, math.nan, math.inf, 1.0, -math.inf], [2, 5]),
        ("> 0.5", [math.nan, None, math.inf], [3]),
        ("< 0.7 of best", [1.0, 0.8, 2.0, 1.41, 1.39], [5]),
        ("> 1.5 of best", [2.0, 1.0, 1.4, 1.6], [4]),
        ("> 2 of first", [1.0, 5.0], [2]),
        ("< 0.7 of best", [-1.0, -1.2, -1.4], [3]),
        ("> 3 of median", [*[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], 9.0], []),
        ("> 3 of median", [*[1.0, 2.0] * 6, 9.0], [13]),
    ],
)
def test_conditions(text: str, values: list[Any], expected: list[int]) -> None:
    assert steps(Engine([rule(text)]), values) == expected


@pytest.mark.parametrize(
    "text",
    ["", "0.5", "above 1", "> x", "> 0.5 of", "> 0.5 of beast", "== 1", "> 1e999", "> nan", "> 0.5 best", ">" * 999],
)
def test_what_is_no_condition_is_one_line(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_condition(text, "observe.alerts.rules.3.condition")
    assert str(error.value).startswith("observe.alerts.rules.3.condition: ")
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_a_condition_is_shown_as_it_is_written() -> None:
    for text in ("> 0.5", "< 0.7 of best", "non-finite", ">= 1e-05"):
        assert str(parse_condition(text)) == text
    assert parse_condition("non_finite") == MetricCondition()


def test_an_episode_ends_when_the_condition_was_false_for_the_window() -> None:
    engine = Engine([rule("> 1", Window(3))])
    high, low = [2.0] * 5, [0.0]
    assert steps(engine, [*high, *low, *high, *low * 3, *high]) == [3, 16]
    assert steps(engine, [*low * 4, *high], 20) == [25]


def test_an_episode_lasts_for_the_minutes_of_the_window() -> None:
    engine = Engine([rule("> 1", Window(1, 5.0))])
    assert steps(engine, [2.0] * 10) == [6]
    assert steps(engine, [0.0] * 3, 11) == []  # the median is low for three minutes
    assert steps(engine, [2.0] * 10, 14) == []
    assert steps(engine, [0.0] * 15, 24) == []
    assert len(steps(engine, [2.0] * 10, 39)) == 1


def test_phases_are_checked_by_themselves() -> None:
    engine = Engine([rule("< 0.5 of best")])
    assert steps(engine, [10.0] * 5, phase="sft") == []
    assert steps(engine, [1.0] * 5) == []
    assert steps(engine, [0.4]) == [1]


def test_past_records_fire_nothing_but_count() -> None:
    past = [{"phase": "rl", "step": n, "time": 60.0 * n, "x": 1.0} for n in range(1, 10)]
    assert steps(Engine([rule("< 0.5 of best")], past), [0.4], 10) == [10]
    assert steps(Engine([rule("> 0.5")], past), [1.0], 10) == []


def test_a_window_has_the_newest_values_of_its_steps_and_minutes() -> None:
    values = WindowValues(Window(3, 5.0), before=10)
    for n in range(20):
        assert values.full == (n > 5)
        values.add(60.0 * n, float(n))
    assert values.median == statistics.median(range(14, 20))
    assert list(values.before) == [float(n) for n in range(4, 14)]


def test_a_clock_that_goes_back_ends_no_window() -> None:
    values = WindowValues(Window(2, 1.0))
    for time in (0.0, 70.0, 5.0, 75.0, 6.0, 140.0):
        values.add(time, 1.0)
    assert values.full


@pytest.mark.parametrize("window", [Window(5000), Window(1, 600.0), Window(2000, 30.0)])
def test_long_windows_are_bounded_and_near_the_median(window: Window) -> None:
    values, known, generator = WindowValues(window, before=256), [], random.Random(1)
    for n in range(20_000):
        known.append(generator.gauss(10.0, 1.0))
        values.add(2.0 * n, known[-1])
    assert values.full
    assert len(values._parts) <= 70
    assert 0 < len(values.before) <= 256
    assert abs(values.median - 10.0) < 0.1

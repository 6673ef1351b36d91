"""Windows, conditions, and when a rule fires again."""

from __future__ import annotations

import functools
import math
import random
import statistics
from typing import Any

import pytest

from rlhpc.config.observe import AlertRuleSection
from rlhpc.observe.alerts.rules import Engine, Limit, Rule, Window, WindowValues


def rule(**limit: Any) -> Rule:
    row = AlertRuleSection(metric="x", **limit)
    return Rule("rule", functools.partial(Limit, row), Window(row.steps, row.minutes))


def steps(engine: Engine, values: list[Any], first: int = 1, seconds: float = 60.0, phase: str = "rl") -> list[int]:
    """Steps at which the rule fires; None is a step without the metric."""
    found = []
    for step, value in enumerate(values, first):
        record = {"phase": phase, "step": step, "time": seconds * step, **({} if value is None else {"x": value})}
        if engine.add(record):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("limit", "values", "expected"),
    [
        ({"above": 0.5}, [0.5, 0.6, 0.7, 0.5, 0.6], [2, 5]),
        ({"below": -1e-3}, [0.0, -0.01], [2]),
        ({"above": 0.0}, [0.0, 1e-9], [2]),
        ({"above": 0.5}, [math.nan, None, math.inf], [3]),
        ({"below": 0.7, "of": "best"}, [1.0, 0.8, 2.0, 1.41, 1.39], [5]),
        ({"below": 0.7, "of": "best"}, [1.0, math.inf, 0.8, 0.6], [4]),
        ({"above": 1.5, "of": "best"}, [2.0, 1.0, 1.4, 1.6], [4]),
        ({"above": 2.0, "of": "first"}, [1.0, 5.0], [2]),
        ({"above": 2.0, "of": "first"}, [1.0, 0.5, 1.5, 2.5], [4]),
        ({"below": 0.7, "of": "best"}, [-1.0, -1.2, -1.4], [3]),
        ({"above": 3.0, "of": "median"}, [*[1.0, 2.0] * 3, 9.0], []),
        ({"above": 3.0, "of": "median"}, [*[1.0, 2.0] * 6, 9.0], [13]),
    ],
)
def test_limits(limit: dict[str, Any], values: list[Any], expected: list[int]) -> None:
    assert steps(Engine([rule(**limit)]), values) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"above": 0.5}, "x is 2 in the last step: above 0.5"),
        ({"above": 0.5, "of": "first", "steps": 2}, "x is 2 in the last 2 steps: above 0.5 of first (2)"),
    ],
)
def test_a_message_has_value_window_and_limit(limit: dict[str, Any], expected: str) -> None:
    engine = Engine([rule(**limit)])
    records = [{"phase": "rl", "step": step, "time": 0.0, "x": 2.0} for step in range(2)]
    assert [message for record in records for _, message in engine.add(record)] == [expected]


def test_an_episode_ends_when_the_condition_was_false_for_the_window() -> None:
    engine = Engine([rule(above=1.0, steps=3)])
    high, low = [2.0] * 5, [0.0]
    assert steps(engine, [*high, *low, *high, *low * 3, *high]) == [3, 16]
    assert steps(engine, [*low * 4, *high], 20) == [25]


def test_an_episode_lasts_for_the_minutes_of_the_window() -> None:
    engine = Engine([rule(above=1.0, minutes=5.0)])
    assert steps(engine, [2.0] * 10) == [6]
    assert steps(engine, [0.0] * 3, 11) == []  # the median is low for three minutes
    assert steps(engine, [2.0] * 10, 14) == []
    assert steps(engine, [0.0] * 15, 24) == []
    assert len(steps(engine, [2.0] * 10, 39)) == 1


def test_phases_are_checked_by_themselves() -> None:
    engine = Engine([rule(below=0.5, of="best")])
    assert steps(engine, [10.0] * 5, phase="sft") == []
    assert steps(engine, [1.0] * 5) == []
    assert steps(engine, [0.4]) == [1]


def test_past_records_fire_nothing_but_count() -> None:
    past = [{"phase": "rl", "step": n, "time": 60.0 * n, "x": 1.0} for n in range(1, 10)]
    assert steps(Engine([rule(below=0.5, of="best")], past), [0.4], 10) == [10]
    assert steps(Engine([rule(above=0.5)], past), [1.0], 10) == []


def test_a_clock_that_goes_back_ends_no_window() -> None:
    values = WindowValues(Window(2, 1.0))
    for time in (0.0, 70.0, 5.0, 75.0, 6.0, 140.0):
        values.add(time, 1.0)
    assert values.median == 1.0


@pytest.mark.parametrize("window", [Window(1), Window(4), Window(5), Window(500), Window(1, 10.0), Window(200, 3.0)])
def test_the_median_is_that_of_the_window_at_each_step(window: Window) -> None:
    values, known, generator = WindowValues(window, before=256), [], random.Random(1)
    count = max(window.steps, round(30 * window.minutes) + 1)  # a step takes two seconds
    for n in range(1000):
        known.append(float(generator.randrange(50)))
        values.add(2.0 * n, known[-1])
        assert values.median == (statistics.median(known[-count:]) if n + 1 >= count else None)
        assert list(values.before) == known[:-count][-256:]

"""When a reward that does not differ is warned of, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.observe.alerts.builtin import BUILTIN
from rlhpc.observe.alerts.rules import Engine
from rlhpc.observe.progress import Display

RULE = BUILTIN["flat_reward"]
STEPS = RULE.window.steps
RISING = {"reward/mean": 0.5, "reward/max": 1.0, "reward/min": 0.0, "advantage/zero_fraction": 0.9}
# All groups solved or failed, GAE on equal rewards, and dynamic sampling that finds no group.
FLAT: list[dict[str, Any]] = [
    {**RISING, "advantage/zero_fraction": 1.0},
    {**RISING, "reward/max": 0.25, "reward/min": 0.25, "advantage/zero_fraction": 0.0},
    {"sampling/dropped_groups": 640, "sampling/kept_groups": 0},
]
# Surplus groups that the next step takes, and a step of one's own with its own metrics.
UNKNOWN: list[dict[str, Any]] = [{"sampling/dropped_groups": 640, "sampling/kept_groups": 2}, {"loss": 0.0}]


def warnings(*steps: dict[str, Any], phase: str = "rl", first: int = 1) -> list[int]:
    """Steps at which a warning comes."""
    engine = Engine([RULE])
    records = [{"phase": phase, "step": n, "time": 60.0 * n, **values} for n, values in enumerate(steps, first)]
    return [record["step"] for record in records if engine.add(record)]


@pytest.mark.parametrize("step", FLAT)
def test_steps_without_advantages_are_warned_of_once(step):
    assert warnings(*[step] * (3 * STEPS)) == [STEPS]


@pytest.mark.parametrize("step", [RISING, *UNKNOWN])
def test_one_other_step_starts_the_count_again(step):
    assert warnings(*[step] * (3 * STEPS)) == []
    assert warnings(*[FLAT[0]] * (STEPS - 1), step, *[FLAT[0]] * STEPS) == [2 * STEPS]


def test_the_warm_up_and_the_first_validation_do_not_count():
    assert not warnings(*[FLAT[0]] * 100, phase="sft")
    assert warnings(*[FLAT[0]] * STEPS, first=0) == []


def test_the_terminal_names_the_page(capsys):
    detector = RULE.detector()
    alert = [detector.add({"phase": "rl", "step": n, "time": 0.0, **FLAT[0]}) for n in range(1, STEPS + 1)][-1]
    with Display(plain_seconds=60) as display:
        display.update([{"phase": "rl", "step": STEPS, "total_steps": 99, **FLAT[0]}], alerts=[{"message": alert}])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: no response had an advantage in 10 steps")
    assert line.endswith("see docs/reward_does_not_rise.md")

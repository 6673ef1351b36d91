"""When a reward that does not differ is warned of, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.observe.flat_reward import FLAT_STEPS, FlatReward
from rlhpc.observe.progress import Display

RISING = {"reward/mean": 0.5, "reward/max": 1.0, "reward/min": 0.0, "advantage/zero_fraction": 0.9}
# All groups solved or failed, GAE on equal rewards, and dynamic sampling that finds no group.
FLAT: list[dict[str, Any]] = [
    {**RISING, "advantage/zero_fraction": 1.0},
    {**RISING, "reward/max": 0.25, "reward/min": 0.25, "advantage/zero_fraction": 0.0},
    {"sampling/dropped_groups": 640, "sampling/kept_groups": 0},
]
# Surplus groups that the next step takes, and a step of one's own with its own metrics.
UNKNOWN: list[dict[str, Any]] = [{"sampling/dropped_groups": 640, "sampling/kept_groups": 2}, {"loss": 0.0}]


def warnings(*steps: dict[str, Any]) -> list[int]:
    """Places of the steps at which a warning comes."""
    flat = FlatReward()
    return [n for n, values in enumerate(steps, 1) if flat.add({"phase": "rl", "step": n, **values})]


@pytest.mark.parametrize("step", FLAT)
def test_steps_without_advantages_are_warned_of_once(step):
    assert warnings(*[step] * (3 * FLAT_STEPS)) == [FLAT_STEPS]


@pytest.mark.parametrize("step", [RISING, *UNKNOWN])
def test_one_other_step_starts_the_count_again(step):
    assert warnings(*[step] * (3 * FLAT_STEPS)) == []
    assert warnings(*[FLAT[0]] * (FLAT_STEPS - 1), step, *[FLAT[0]] * FLAT_STEPS) == [2 * FLAT_STEPS]


def test_the_warm_up_and_the_first_validation_do_not_count():
    flat = FlatReward()
    assert not any(flat.add({"phase": "sft", "step": n, **FLAT[0]}) for n in range(100))
    assert not any(flat.add({"phase": "rl", "step": 0, **FLAT[0]}) for n in range(100))


def test_the_terminal_names_the_page(capsys):
    with Display(plain_seconds=60) as display:
        for number in range(1, 3 * FLAT_STEPS):
            display.update([{"phase": "rl", "step": number, "total_steps": 99, **FLAT[0]}])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: no response had an advantage in 10 steps")
    assert line.endswith("see docs/reward_does_not_rise.md")

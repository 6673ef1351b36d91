"""The rate of every step, against the formulas."""

from __future__ import annotations

import math

import pytest

from rlhpc.algo.schedule import learning_rate
from rlhpc.config.training import OptimizerSection


def rates(steps: int, **keys: object) -> list[float]:
    section = OptimizerSection(learning_rate=2.0, **keys)
    return [learning_rate(section, step, steps) for step in range(steps)]


def test_the_rate_rises_linearly_to_its_highest_and_stays():
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(3) == [2.0, 2.0, 2.0]


def test_linear_falls_in_equal_steps_towards_the_final_fraction():
    assert rates(6, warmup_steps=2, schedule="linear", final_fraction=0.5) == pytest.approx(
        [1.0, 2.0, 2.0, 1.75, 1.5, 1.25]
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_last_step_learns(schedule):
    """Its rate is the one a step before the end: the final fraction, 0 by default, holds after the last step."""
    for warmup in (0, 3):
        found = rates(10, schedule=schedule, warmup_steps=warmup)
        assert found[-1] > 0
        section = OptimizerSection(learning_rate=2.0, schedule=schedule, warmup_steps=warmup)
        assert learning_rate(section, 10, 10) == pytest.approx(0)


@pytest.mark.heavy
def test_cosine_is_half_a_wave():
    """Loshchilov and Hutter 2017, equation 5, without restarts; PyTorch's own scheduler agrees."""
    import torch

    found = rates(11, schedule="cosine", final_fraction=0.1)
    assert found == pytest.approx([0.2 + 1.8 * (1 + math.cos(math.pi * step / 11)) / 2 for step in range(11)])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=11, eta_min=0.2)
    theirs = []
    for _ in range(11):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(theirs)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_warm_up_as_long_as_the_run_never_falls(schedule):
    assert rates(3, warmup_steps=3, schedule=schedule) == pytest.approx([2 / 3, 4 / 3, 2.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_single_step_is_taken_at_the_highest_rate(schedule):
    assert rates(1, schedule=schedule) == [2.0]


def test_past_the_end_the_final_rate_holds():
    """A run that is resumed with fewer steps than it has taken."""
    section = OptimizerSection(learning_rate=2.0, schedule="linear", final_fraction=0.25)
    assert learning_rate(section, 20, 10) == 0.5

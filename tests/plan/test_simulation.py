"""Simulated steps agree with the predicted ones, on a smaller job of the same proportions."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from rlhpc.config.load import load_config
from rlhpc.models import read_model
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.plan.simulation import load_of, simulate, smaller
from rlhpc.rollout.schedule.generation_load import GenerationLoad, SampledLengths, Simulated
from rlhpc.sharding.layout import make_layout
from rlhpc.sharding.placement import engine_ranks

FILE = Path(__file__).parents[2] / "configs" / "ready" / "qwen2.5-7b-1node.yaml"
HALVES = ("placement=separate", "rollout.ranks=4", "rollout.gpu_memory_utilization=0.9")
TAILED = ("planning.response_spread=1", "planning.response_tokens=1000", "rollout.max_response_tokens=8192")


def simulated(*changes: str) -> tuple[StepTime, Simulated, GenerationLoad]:
    config = load_config(FILE, changes)
    shape, efficiency, gpu = read_model(config.model.path), config.site.efficiency, GPUS["h100"]
    layout = make_layout(config.actor.parallel, config.world_size - (engine_ranks(config) or 0))
    step = predict_step(config, shape, layout, gpu, efficiency)
    return step, simulate(config, shape, step, gpu, efficiency), load_of(config, shape, step, gpu, efficiency)


def test_a_smaller_job_has_the_same_proportions() -> None:
    load = simulated(*HALVES, *TAILED, "rollout.max_response_tokens=3000")[2]
    less = smaller(load)
    assert (load.groups_per_step, less.groups_per_step, less.engines) == (256, 64, 4)
    assert less.full_seconds == pytest.approx(load.full_seconds, rel=0.02)
    assert (less.train_seconds, less.step_seconds) == (load.train_seconds, load.step_seconds)
    waves = [each.groups_per_step * each.samples_per_group / each.engines / each.slots for each in (load, less)]
    assert waves[1] == pytest.approx(waves[0], rel=0.02)
    assert fmean(length for group in range(200) for length in SampledLengths(load)[group]) == pytest.approx(
        1000, rel=0.05
    )
    assert smaller(less) == less


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("lengths", [(), TAILED, (*TAILED, "rollout.tp=4")], ids=["short", "tailed", "tp 4"])
def test_a_simulated_step_takes_about_as_long_as_a_predicted_one(lengths: tuple[str, ...], staleness: int) -> None:
    step, found, _ = simulated(*HALVES, *lengths, f"asynchrony.max_staleness={staleness}")
    assert step.sides is not None
    assert 0.95 < found.step_seconds / step.seconds < 1.15
    assert found.max_staleness <= staleness
    # The first steps, which are younger, count in the simulation.
    assert found.staleness == pytest.approx(step.sides.staleness, abs=0.35 + 0.15 * staleness)
    assert found.idle_trainers == pytest.approx(step.sides.idle_trainers, abs=0.1)
    assert found.idle_engines == pytest.approx(step.sides.idle_engines, abs=0.2)


@pytest.mark.parametrize("staleness", [1, 2])
def test_lenders_shorten_a_simulated_step_as_predicted(staleness: int) -> None:
    """Engines have more work than the trainers."""
    ahead = f"asynchrony.max_staleness={staleness}"
    long = (*HALVES, "placement=separate", "rollout.ranks=2", "rollout.gpu_memory_utilization=0.4", *TAILED, ahead)
    (alone, waiting, _), (step, found, load) = simulated(*long), simulated(*long, "placement=lend")
    assert step.sides is not None
    assert (load.lenders, load.engines, smaller(load).lenders) == (6, 2, 6)
    assert load.lend_overhead_seconds == step.sides.lend_overhead > 0
    assert step.seconds <= alone.seconds
    assert found.step_seconds <= waiting.step_seconds
    assert found.idle_trainers <= max(0.04, 0.5 * waiting.idle_trainers)  # where they hardly wait, none lends
    assert 0.85 < found.step_seconds / step.seconds < 1.2


def test_groups_that_are_dropped_are_replaced_later() -> None:
    dynamic = ("train.dynamic_sampling={}", "planning.sampling_batches=2", *HALVES, *TAILED)
    for staleness in (1, 3):
        step, found, load = simulated(*dynamic, f"asynchrony.max_staleness={staleness}")
        assert step.sides is not None
        assert load.kept == 0.5
        assert 0.85 < found.step_seconds / step.seconds < 1.2
    (without, *_), (with_drops, *_) = simulated(*HALVES, *TAILED), simulated(*dynamic)
    assert with_drops.seconds > 1.5 * without.seconds


def test_a_colocated_step_is_simulated_too() -> None:
    for lengths in ((), TAILED):
        step, found, _ = simulated(*lengths)
        assert 0.9 < found.step_seconds / step.seconds < 1.1

"""The interval between checkpoints that loses least, from the time of a save and a stated risk."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.plan.estimates.run_time import recommend_interval, steps_between
from tests.helpers.plain_model import write_inputs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def make(file: Path, *changes: str) -> RunConfig:
    return load_config(file, [*changes])


def test_young_and_daly_s_square_root(file: Path) -> None:
    config = make(file, "planning.node_mtbf_hours=10000", "checkpoint.every=20")
    found = recommend_interval(config, 100, 30.0, save=50.0, write=50.0)
    assert found.mtbf == 360_000, "100 hours of 100 nodes"
    assert found.best == 6000.0
    assert found.configured == 600.0
    assert found.loss(6000.0) == pytest.approx(50 / 6000 + 6000 / 720_000)
    others = [found.loss(found.best * factor) for factor in (0.5, 0.9, 1.1, 2.0)]
    assert all(found.loss(found.best) < other for other in others)


def test_a_save_that_was_measured_precedes_the_prediction(file: Path) -> None:
    config = make(file, "planning.node_mtbf_hours=10000")
    found = recommend_interval(config, 100, 30.0, save=50.0, write=50.0, measured=[300.0, 200.0, 100.0])
    assert (found.save, found.measured, found.best) == (200.0, True, 12000.0)


def test_in_the_background_the_wait_counts_and_the_next_save_comes_after_the_last(file: Path) -> None:
    config = make(file, "planning.node_mtbf_hours=10000", "checkpoint.asynchronous=true")
    found = recommend_interval(config, 100, 30.0, save=2.0, write=50.0, measured=[300.0])
    assert (found.save, found.measured, found.best) == (2.0, False, 1200.0)
    assert recommend_interval(config, 100, 30.0, save=2.0, write=1500.0).best == 1500.0


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ([], 20),
        (["checkpoint.every_minutes=5"], 10),
        (["checkpoint.every_minutes=5.1"], 11),
        (["checkpoint.every_minutes=0.1"], 1),
        (["checkpoint.every_minutes=60"], 20),
        (["checkpoint.every=0"], 0),
        (["checkpoint.every=0", "checkpoint.every_minutes=60"], 120),
    ],
)
def test_steps_from_one_checkpoint_to_the_next(file: Path, changes: list[str], steps: int) -> None:
    """Of 30 seconds each."""
    assert steps_between(make(file, "checkpoint.every=20", *changes), 30.0) == steps

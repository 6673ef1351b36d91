"""``rlhpc plan run`` says what a step takes without some of the rollout jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_plan_interval import SEPARATE, plan

JOBS = (
    *("slurm.nodes=5", "rollout.nodes=4", "recovery.lost_engines=rejoin", "asynchrony.schedule=arrival"),
    "slurm.rollout_jobs.count=4",
)


def test_steps_without_some_of_the_jobs_are_predicted(tmp_path: Path) -> None:
    words = (SEPARATE, f"run_dir={tmp_path}", *JOBS)
    known = json.loads(plan("run", *words, "--json"))
    rows, sides = known["run"]["rollout_jobs"], known["time"]["sides"]
    assert [row["absent"] for row in rows] == [1, 2, 3]
    for row in rows:  # of four jobs, so many are left
        left = (4 - row["absent"]) / 4
        chain = (sides["makespan"] / left + sides["trainers"]["seconds"]) / (sides["staleness"]["max"] + 1)
        least = max(sides["engines"]["seconds"] / left, sides["trainers"]["seconds"], chain)
        assert row["seconds"] == pytest.approx(least, rel=0.05)
        assert row["idle_trainers"] == pytest.approx(1 - sides["trainers"]["seconds"] / row["seconds"])
    text = plan("run", *words)
    assert "\nrollout   without 1 of the rollout jobs a step takes at most " in text


def test_without_rollout_jobs_nothing_is_said_of_them(tmp_path: Path) -> None:
    words = (SEPARATE, f"run_dir={tmp_path}", *JOBS[:-1])
    assert "rollout_jobs" not in json.loads(plan("run", *words, "--json"))["run"]

"""Trainers that die in a Slurm job start again within their attempt: engines stay as processes and wait for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core import attempts
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.observe.alerts.record import read_alerts
from tests.helpers.runs import ROOT, records
from tests.helpers.waiting import until
from tests.slurm.chaos import config, difference, submit, undisturbed
from tests.slurm.cluster import Cluster
from tests.slurm.random_losses import elastic
from tests.slurm.settings import Settings
from tests.slurm.test_lost_engines import Job
from tests.slurm.test_rollout_jobs import Jobs
from tests.trainer.test_lost_engines import newest_step, process_of

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(900)]

STEPS, EVERY = 12, 4
TWO_ENGINES: dict[str, Any] = {"resources": {"ranks_per_node": 1}, "rollout__ranks": 2}
OF_TWO_RANKS: dict[str, Any] = {"resources": {"ranks_per_node": 2}, "rollout__ranks": 2, "rollout__tp": 2}
SHORT: dict[str, Any] = {
    **{key: value for key, value in elastic(2, 15).items() if key not in TWO_ENGINES},
    "asynchrony": {"max_staleness": 1},  # in virtual time
    "train__steps": STEPS,
    "checkpoint__every": EVERY,
    "validation__every": 6,
}


def is_another(run: RunFolder, trainer: int) -> bool:
    """Whether the first rank is another process."""
    start = read_starts(run.attempt(1).exits).get(0)
    return start is not None and start.process.pid != trainer


@pytest.fixture
def cluster(slurm: None) -> Iterator[Cluster]:
    with Cluster.up(Settings(nodes=3)) as cluster:
        yield cluster


def finished(cluster: Cluster, folder: Path, nodes: int, engines: range, **changes: Any) -> Job:
    """A run whose first trainer is killed after a checkpoint, and whose engines' ranks stay; at its end."""
    job = Job(cluster, submit(cluster, config(folder, nodes, **SHORT, **changes)), RunFolder(folder / "run"))
    job.reach(EVERY + 2)
    trainer, *others = (process_of(job.run, rank) for rank in (0, *engines))
    cluster.run(["kill", "-KILL", str(trainer)], node="node1", check=True)
    until(lambda: is_another(job.run, trainer), "the trainer's start", seconds=60)
    cluster.wait_state(job.job_id, "COMPLETED", timeout=400)
    assert [process_of(job.run, rank) for rank in engines] == others
    assert len(attempts.folders(job.run)) == 1
    return job


def test_engines_wait_for_trainers_that_start_again(cluster: Cluster, tmp_path: Path) -> None:
    job = finished(cluster, tmp_path / "one", 3, range(1, 3), **TWO_ENGINES)
    assert [verdict.cause for verdict in attempts.restarts(job.run.attempt(1))] == ["crash"]
    assert "the engines wait for them" in job.output
    assert [alert.rule for alert in read_alerts(job.run)].count("retry") == 1
    taken = [record["step"] for record in records(job.run.path) if record["phase"] == "rl" and record["step"]]
    assert taken == [*range(1, STEPS + 1)]
    shown = [sys.executable, "-m", "rlhpc.cli.main", "status", str(job.run.path)]
    words = cluster.run(shown, env={"COLUMNS": "200", "PYTHONPATH": str(ROOT)}, check=True).stdout
    assert "1 restart(s) of the trainers" in words


@pytest.mark.long
def test_the_run_ends_as_one_without_the_fault(cluster: Cluster, tmp_path: Path) -> None:
    """Two trainers, of which one dies, and an engine of two ranks."""
    reference = undisturbed(cluster, tmp_path / "reference", 2, **SHORT, **OF_TWO_RANKS)
    job = finished(cluster, tmp_path / "one", 2, range(2, 4), **OF_TWO_RANKS)
    assert difference(job.run.path, reference) == ""


@pytest.mark.long
def test_engines_of_a_rollout_job_wait_for_trainers(cluster: Cluster, tmp_path: Path) -> None:
    jobs = Jobs(cluster, tmp_path, 2)
    jobs.reach(2)
    until(lambda: jobs.lives(0) == jobs.lives(1) == 1, "both engines", seconds=120)
    engines, trainer = [process_of(jobs.run, rank) for rank in (1, 2)], process_of(jobs.run, 0)
    cluster.run(["kill", "-KILL", str(trainer)], node=jobs.queue()[str(jobs.trainers)][1], check=True)
    until(lambda: is_another(jobs.run, trainer), "the trainer's start", seconds=60)
    jobs.reach(newest_step(jobs.run) + 3)
    assert [process_of(jobs.run, rank) for rank in (1, 2)] == engines
    assert len(attempts.folders(jobs.run)) == 1
    taken = [record["step"] for record in records(jobs.run.path) if record["phase"] == "rl" and record["step"]]
    assert taken == [*range(1, len(taken) + 1)]
    jobs.rlhpc("cancel", str(jobs.run.path))
    until(lambda: not jobs.queue(), "the end of all jobs", seconds=60)

"""One run of several real Slurm jobs: engines are in jobs of their own, which begin late, are preempted and come back
while the trainers go on in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import beats_file, read_beats
from rlhpc.launch.runs.run_registry import read_run
from rlhpc.launch.supervise.engine_losses import EngineLife, read_engines
from rlhpc.rollout.generator.record import read_record
from tests.helpers.runs import ROOT, records
from tests.helpers.waiting import until
from tests.slurm.chaos import config, submit
from tests.slurm.cluster import Cluster
from tests.slurm.random_losses import elastic, in_jobs
from tests.slurm.settings import Settings
from tests.slurm.test_lost_engines import check_once
from tests.trainer.test_lost_engines import newest_step, process_of

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(900)]

TIMEOUT = 15


class Jobs:
    """A run's jobs on a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, count: int, **more: Any) -> None:
        self.cluster, self.run = cluster, RunFolder(folder / "run")
        known = {**in_jobs(count, 1, TIMEOUT), "train__steps": 2000, "checkpoint__every": 20}
        self.trainers = submit(cluster, config(folder, 0, **{**known, "validation__every": 1000, **more}))
        record = read_run(self.run.path).job
        assert record is not None
        self.rollout = record.rollout_job

    def queue(self) -> dict[str, tuple[str, str]]:
        """State and nodes of each job that is in the queue."""
        lines = self.cluster.run("squeue -h -r -o '%i|%T|%N'").stdout.splitlines()
        return {job: (state, nodes) for job, state, nodes in (line.split("|") for line in lines)}

    def reach(self, step: int, seconds: float = 300.0) -> None:
        until(lambda: newest_step(self.run) >= step or not self.queue(), f"step {step}", seconds=seconds)
        assert newest_step(self.run) >= step, self.output

    def preempt(self, job: str, seconds: int) -> None:
        """Takes a job's node for so long."""
        node = self.queue()[job][1]
        options = ("--partition=urgent", "--exclusive", f"--nodelist={node}")
        self.cluster.submit(*options, script=f"sleep {seconds}", cwd="/tmp")

    @property
    def output(self) -> str:
        folders = (self.run.submission, self.run.rollout_submission)
        return "".join(file.read_text() for folder in folders for file in sorted(folder.glob("*_log.out")))

    @property
    def engines(self) -> tuple[EngineLife, ...]:
        known = read_engines(attempts.folders(self.run)[-1])
        return known.engines if known is not None else ()

    def lives(self, engine: int) -> int:
        """How often an engine has begun to generate."""
        return sum(bool(life) for life in read_record(self.run).lives.get(engine, []))

    def rlhpc(self, *words: str) -> str:
        command = [sys.executable, "-m", "rlhpc.cli.main", *words]
        environ = {"COLUMNS": "200", "PYTHONPATH": str(ROOT)}
        return self.cluster.run(command, env=environ, check=True).stdout


@pytest.fixture
def cluster(slurm: None) -> Iterator[Cluster]:
    with Cluster.up(Settings(nodes=3)) as cluster:
        yield cluster


def test_a_rollout_job_is_preempted_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    jobs = Jobs(cluster, tmp_path, 2)
    first, second = f"{jobs.rollout}_0", f"{jobs.rollout}_1"
    jobs.reach(2)
    until(lambda: jobs.lives(0) == jobs.lives(1) == 1, "both engines", seconds=120)
    trainer = process_of(jobs.run, 0)
    jobs.preempt(second, 20)
    until(lambda: jobs.queue()[second][0] == "PENDING", "the preemption", seconds=60)
    jobs.reach(newest_step(jobs.run) + 2)
    shown = jobs.rlhpc("status", str(jobs.run.path))
    assert f"{first}: running" in shown
    until(lambda: jobs.lives(1) == 2, "its return", seconds=180)
    jobs.reach(newest_step(jobs.run) + 2)
    assert process_of(jobs.run, 0) == trainer
    assert [engine.generation for engine in jobs.engines] == [1, 2]
    check_once(jobs.run)
    jobs.rlhpc("cancel", str(jobs.run.path))
    until(lambda: not jobs.queue(), "the end of all jobs", seconds=60)


@pytest.mark.long
def test_trainers_wait_for_the_only_rollout_job_and_then_end_it(cluster: Cluster, tmp_path: Path) -> None:
    """It begins after them, and is preempted; they wait longer than any hang may last."""
    hold = cluster.submit("--partition=urgent", "--exclusive", "--nodelist=node[2-3]", script="sleep 90", cwd="/tmp")
    recovery = {**elastic(1, TIMEOUT)["recovery"], "hang_timeout_seconds": 30, "storage_wait_seconds": 10}
    more = {"train__steps": 8, "validation__every": 4, "recovery": recovery}
    jobs = Jobs(cluster, tmp_path, 1, **more)
    until(lambda: phase(jobs.run) == "waiting for engines", "trainers that wait")
    trainer = process_of(jobs.run, 0)
    cluster.wait_state(hold, "COMPLETED", timeout=200)
    jobs.reach(2)
    jobs.preempt(jobs.rollout, 40)
    cluster.wait_state(jobs.trainers, "COMPLETED", timeout=400)
    assert process_of(jobs.run, 0) == trainer
    validated = [record["validation/step"] for record in records(jobs.run.path) if "validation/step" in record]
    assert validated == [0, 4, 8]
    check_once(jobs.run)
    until(lambda: not jobs.queue(), "the end of the rollout job", seconds=60)


@pytest.mark.long
def test_trainers_whose_rollout_jobs_are_all_gone_save_and_are_resumed_with_new_ones(
    cluster: Cluster, tmp_path: Path
) -> None:
    jobs = Jobs(cluster, tmp_path, 1)
    jobs.reach(3)
    cluster.run(f"scancel {jobs.rollout}", check=True)
    until(lambda: phase(jobs.run) == "waiting for engines", "trainers that wait")
    step = newest_step(jobs.run)
    cluster.wait_state(jobs.trainers, "COMPLETED", timeout=300)
    assert "all rollout jobs have ended; the trainers have no engines: they save and end" in jobs.output
    assert attempts.saved_step(jobs.run) == step + 2  # of supervised steps too
    jobs.rlhpc("resume", str(jobs.run.path), "train.steps=2000")
    record = read_run(jobs.run.path).job
    assert record is not None
    assert record.rollout_job not in ("", jobs.rollout)
    jobs.reach(step + 2)
    taken = [record["step"] for record in records(jobs.run.path) if record["phase"] == "rl" and record["step"]]
    assert taken == [*range(1, len(taken) + 1)]
    jobs.rlhpc("cancel", str(jobs.run.path))


def phase(run: RunFolder) -> str:
    """What the trainers' rank does."""
    beats = run.attempt(1).heartbeats
    return read_beats(beats)[0].phase if beats_file(beats).exists() else ""

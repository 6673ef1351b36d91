"""Engines are lost in a real Slurm job: killed, stopped, with their node, or cut off. Training goes on in the same
process, and takes every step once; and a job that loses its first node is requeued, which Slurm would not do."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core import attempts
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.engine_losses import EngineLife, read_engines
from rlhpc.observe.alerts.record import read_alerts
from rlhpc.rollout.generator.record import read_record
from tests.helpers.runs import records
from tests.helpers.waiting import until
from tests.slurm.chaos import config, submit
from tests.slurm.cluster import Cluster
from tests.slurm.random_losses import elastic, run_once
from tests.slurm.settings import Settings
from tests.trainer.test_lost_engines import is_back, newest_step, process_of

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(900)]

TIMEOUT = 15
ELASTIC: dict[str, Any] = {
    **elastic(2, TIMEOUT),
    "train__steps": 2000,
    "checkpoint__every": 20,
    "validation__every": 1000,
}
PROMPTS = 32


@dataclass
class Job:
    """A job of three nodes: trainers on the first, an engine on each of the others."""

    cluster: Cluster
    job_id: int
    run: RunFolder

    def reach(self, step: int, seconds: float = 300.0) -> None:
        """Waits for a step."""
        until(lambda: newest_step(self.run) >= step or self.state != "RUNNING", f"step {step}", seconds=seconds)
        assert newest_step(self.run) >= step, self.output

    @property
    def state(self) -> str:
        return self.cluster.run(f"squeue -h -j {self.job_id} -o %T").stdout.strip()

    @property
    def output(self) -> str:
        return "".join(file.read_text() for file in self.run.submission.glob("*_log.out"))

    @property
    def engines(self) -> tuple[EngineLife, ...]:
        """The engines of the newest attempt."""
        known = read_engines(attempts.folders(self.run)[-1])
        return known.engines if known is not None else ()

    def signal_engine(self, node: str, signal: str) -> None:
        self.cluster.run(f"pkill -{signal} -f worker.main", node=node, check=True)


def check_once(run: RunFolder) -> None:
    """Every step and every group once, and in one attempt."""
    steps = [record["step"] for record in records(run.path) if record["phase"] == "rl" and record["step"]]
    assert steps == list(range(1, len(steps) + 1))
    batches = read_record(run).batches
    groups = [group for step in sorted(batches) for group in batches[step].kept]
    assert len(groups) == len(set(groups)) == PROMPTS * len(batches)
    assert len(attempts.folders(run)) == 1


@pytest.fixture
def job(slurm: None, tmp_path: Path) -> Iterator[Job]:
    with Cluster.up(Settings(nodes=3)) as cluster:
        job_id = submit(cluster, config(tmp_path / "one", 3, **ELASTIC))
        yield Job(cluster, job_id, RunFolder(tmp_path / "one" / "run"))


def test_an_engine_that_is_killed_comes_back(job: Job) -> None:
    job.reach(2)
    trainer, attempt = process_of(job.run, 0), attempts.read_attempt(job.run.attempt(1))
    assert attempt is not None
    began = next(record["time"] for record in records(job.run.path) if record["phase"] == "rl") - attempt.started
    hit = time.monotonic()
    job.signal_engine("node3", "KILL")
    until(lambda: is_back(job.run) or job.state != "RUNNING", "the engine's return", seconds=300)
    assert time.monotonic() - hit <= 2 * began
    job.reach(newest_step(job.run) + 3)
    assert process_of(job.run, 0) == trainer
    assert [engine.generation for engine in job.engines] == [0, 1]
    assert "engine 1 on node3 was lost" in job.output
    assert [alert.rule for alert in read_alerts(job.run)].count("lost_engine") == 1
    check_once(job.run)


@pytest.mark.long
def test_an_engine_that_does_not_answer_is_given_up_and_comes_back(job: Job) -> None:
    """First stopped, then cut off for a while."""
    job.reach(2)
    trainer = process_of(job.run, 0)
    for losses, hit in enumerate((lambda: job.signal_engine("node3", "STOP"), lambda: job.cluster.unplug("node3")), 1):
        hit()
        began, step = time.monotonic(), newest_step(job.run)
        until(lambda step=step: newest_step(job.run) > step + 2, "a step without it", seconds=120)
        assert time.monotonic() - began < TIMEOUT + 15
        job.cluster.plug("node3")
        until(lambda losses=losses: job.engines[1].generation >= losses, "its start", seconds=120)
        until(lambda losses=losses: len(read_record(job.run).lives[1]) > losses, "its return", seconds=120)
    assert process_of(job.run, 0) == trainer
    check_once(job.run)


@pytest.mark.long
def test_a_node_of_an_engine_and_then_the_first_node_crash(job: Job) -> None:
    job.reach(2)
    trainer = process_of(job.run, 0)
    job.cluster.crash("node3")
    until(lambda: job.engines[1].phase == "gone", "the end of the engine", seconds=200)
    job.reach(newest_step(job.run) + 5)
    assert process_of(job.run, 0) == trainer
    assert job.engines[0].generation == 0
    check_once(job.run)
    job.reach(25)  # with a checkpoint
    job.cluster.crash("node1")
    until(lambda: job.state == "PENDING", "the requeue, by a guard", seconds=200)
    for node in ("node1", "node3"):
        job.cluster.boot(node)
    until(lambda: len(attempts.folders(job.run)) == 2, "the next attempt", seconds=120)
    step = newest_step(job.run)
    job.reach(step + 2)
    assert {start.node for start in read_starts(job.run.attempt(2).exits).values()} == {"node1", "node2", "node3"}


@pytest.mark.long
def test_an_engine_on_the_node_of_a_trainer_comes_back(slurm: None, tmp_path: Path) -> None:
    """Two ranks on each of two nodes: the first trains, the others are engines. Each step is a part of its node."""
    with Cluster.up(Settings(nodes=2)) as cluster:
        shape = {"resources": {"ranks_per_node": 2}, "rollout__ranks": 3}
        run = RunFolder(tmp_path / "one" / "run")
        job = Job(cluster, submit(cluster, config(tmp_path / "one", 2, **{**ELASTIC, **shape})), run)
        job.reach(2)
        starts = read_starts(run.attempt(1).exits)
        assert [starts[rank].node for rank in range(4)] == ["node1", "node1", "node2", "node2"]
        cluster.run(["kill", "-KILL", str(starts[1].process.pid)], node="node1", check=True)
        until(lambda: [engine.generation for engine in job.engines] == [1, 0, 0], "its start", seconds=120)
        until(lambda: len(read_record(run).lives[0]) > 1, "its return", seconds=120)
        assert process_of(run, 0) == starts[0].process.pid
        assert sorted(path.name for path in run.attempt(1).logs.iterdir()) == [f"rank-{n:05d}.log" for n in range(4)]
        check_once(job.run)


@pytest.mark.long
def test_a_replay_of_a_run_with_losses_has_its_weights(slurm: None, tmp_path: Path) -> None:
    """A case of ``python -m tests.slurm.random_losses``."""
    outcome = run_once(tmp_path, ["stop_engine", "crash_first"], random.Random(4))
    assert not outcome.wrong, outcome
    assert outcome.starts == 2

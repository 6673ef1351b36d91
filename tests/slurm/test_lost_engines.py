"""Engines are lost in a real Slurm job: stopped, with their node, or cut off. Training goes on in the same
process, and takes every step once; and a job that loses its first node is requeued, which Slurm would not do."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core import attempts
from rlhpc.core.exits import read_starts
from rlhpc.rollout.generator.record import read_record
from tests.helpers.waiting import until
from tests.slurm.chaos import difference, undisturbed
from tests.slurm.cluster import Cluster
from tests.slurm.elastic import TIMEOUT, ElasticRun, check_once, elastic, is_another
from tests.slurm.random_losses import run_once
from tests.slurm.settings import Settings
from tests.trainer.test_lost_engines import newest_step, process_of

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(900)]

STEPS, EVERY = 12, 4
OF_TWO_RANKS: dict[str, Any] = {"resources": {"ranks_per_node": 2}, "rollout__ranks": 2, "rollout__tp": 2}
SHORT: dict[str, Any] = {
    **elastic(2, TIMEOUT),
    "asynchrony": {"max_staleness": 1},  # in virtual time
    "train__steps": STEPS,
    "checkpoint__every": EVERY,
    "validation__every": 6,
    **OF_TWO_RANKS,
}


@pytest.fixture
def job(slurm: None, tmp_path: Path) -> Iterator[ElasticRun]:
    """Three nodes: trainers on the first, an engine on each of the others."""
    with Cluster.up(Settings(nodes=3)) as cluster:
        yield ElasticRun(cluster, tmp_path / "one", 3, **elastic(2, TIMEOUT))


@pytest.mark.long
def test_an_engine_that_does_not_answer_is_given_up_and_comes_back(job: ElasticRun) -> None:
    """First stopped, then cut off for a while."""
    job.reach(2)
    trainer = process_of(job.run, 0)
    for losses, hit in enumerate((lambda: job.kill(2, "STOP"), lambda: job.cluster.unplug("node3")), 1):
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
def test_a_node_of_an_engine_and_then_the_first_node_crash(job: ElasticRun) -> None:
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
        job = ElasticRun(cluster, tmp_path / "one", 2, **{**elastic(3, TIMEOUT), **shape})
        run = job.run
        job.reach(2)
        starts = read_starts(run.attempt(1).exits)
        assert [starts[rank].node for rank in range(4)] == ["node1", "node1", "node2", "node2"]
        job.kill(1)
        until(lambda: [engine.generation for engine in job.engines] == [1, 0, 0], "its start", seconds=120)
        until(lambda: len(read_record(run).lives[0]) > 1, "its return", seconds=120)
        assert process_of(run, 0) == starts[0].process.pid
        assert sorted(path.name for path in run.attempt(1).logs.iterdir()) == [f"rank-{n:05d}.log" for n in range(4)]
        check_once(run)


@pytest.mark.long
def test_a_run_whose_trainers_start_again_ends_as_one_without_the_fault(slurm: None, tmp_path: Path) -> None:
    """Two trainers, of which one dies after a checkpoint, and an engine of two ranks that stay."""
    with Cluster.up(Settings(nodes=2)) as cluster:
        reference = undisturbed(cluster, tmp_path / "reference", 2, **SHORT)
        job = ElasticRun(cluster, tmp_path / "one", 2, **SHORT)
        job.reach(EVERY + 2)
        engines = [process_of(job.run, rank) for rank in (2, 3)]
        trainer = job.kill(0)
        until(lambda: is_another(job.run, trainer), "the trainer's start", seconds=60)
        cluster.wait_state(job.job, "COMPLETED", timeout=400)
        assert [process_of(job.run, rank) for rank in (2, 3)] == engines
        assert len(attempts.folders(job.run)) == 1
        assert difference(job.run.path, reference) == ""


@pytest.mark.long
def test_a_replay_of_a_run_with_losses_has_its_weights(slurm: None, tmp_path: Path) -> None:
    """A case of ``python -m tests.slurm.random_losses``."""
    outcome = run_once(tmp_path, ["stop_engine", "crash_first"], random.Random(4))
    assert not outcome.wrong, outcome
    assert outcome.starts == 2

"""One run of several real Slurm jobs: parts are lost and come back while the rest goes on in the same processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import beats_file, read_beats
from rlhpc.launch.runs.run_registry import read_run
from rlhpc.observe.alerts.record import read_alerts
from tests.helpers.runs import records
from tests.helpers.waiting import until
from tests.slurm.cluster import Cluster
from tests.slurm.elastic import TIMEOUT, ElasticRun, check_once, elastic, in_jobs, is_another, steps
from tests.slurm.settings import Settings
from tests.trainer.test_lost_engines import newest_step, process_of

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def losses(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticRun]:
    """A run with three nodes: a trainer and an engine in its first job, and an engine in a rollout job. Both generate.

    Each test takes one part away and waits for its return.
    """
    with Cluster.up(Settings(nodes=3)) as cluster:
        keys = in_jobs(1, 2, TIMEOUT, engines=1)
        run = ElasticRun(cluster, tmp_path_factory.mktemp("losses"), **{**keys, "checkpoint__every": 4})
        run.reach(2)
        until(lambda: run.lives(0) and run.lives(1), "both engines")
        yield run
        run.end()


def alerts_of(run: ElasticRun, rule: str) -> int:
    return [alert.rule for alert in read_alerts(run.run)].count(rule)


def test_a_rollout_job_is_preempted_and_comes_back(losses: ElasticRun) -> None:
    trainer, lives = process_of(losses.run, 0), losses.lives(1)
    former = [engine.generation for engine in losses.engines]
    losses.preempt(losses.rollout, 2)
    until(lambda: losses.queue()[losses.rollout][0] == "PENDING", "the preemption")
    losses.reach(newest_step(losses.run) + 2)
    shown = losses.rlhpc("status", str(losses.run.path))
    assert f"{losses.job}: running" in shown
    until(lambda: losses.lives(1) > lives, "its return")
    losses.reach(newest_step(losses.run) + 2)
    assert process_of(losses.run, 0) == trainer
    assert [engine.generation for engine in losses.engines] == [former[0], former[1] + 1]
    check_once(losses.run)


def test_an_engine_that_is_killed_comes_back(losses: ElasticRun) -> None:
    run, trainer = losses.run, process_of(losses.run, 0)
    attempt, lives, alerts = attempts.read_attempt(run.attempt(1)), losses.lives(0), alerts_of(losses, "lost_engine")
    former = [engine.generation for engine in losses.engines]
    assert attempt is not None
    began = next(record["time"] for record in records(run.path) if record["phase"] == "rl") - attempt.started
    hit = time.monotonic()
    losses.kill(1)
    until(lambda: losses.lives(0) > lives or not losses.state, "the engine's return")
    assert time.monotonic() - hit <= 2 * began
    losses.reach(newest_step(run) + 3)
    assert process_of(run, 0) == trainer
    assert [engine.generation for engine in losses.engines] == [former[0] + 1, former[1]]
    assert "engine 0 on node2 was lost" in losses.output
    assert alerts_of(losses, "lost_engine") == alerts + 1
    check_once(run)


def test_engines_wait_for_trainers_that_start_again(losses: ElasticRun) -> None:
    run, engines = losses.run, [process_of(losses.run, rank) for rank in (1, 2)]
    until(lambda: attempts.saved_step(run) > 0, "a checkpoint")
    trainer, step = losses.kill(0), newest_step(run)
    until(lambda: is_another(run, trainer), "the trainer's start")
    losses.reach(step + 3)
    assert [process_of(run, rank) for rank in (1, 2)] == engines
    assert [verdict.cause for verdict in attempts.restarts(run.attempt(1))] == ["crash"]
    assert "the engines wait for them" in losses.output
    assert alerts_of(losses, "retry") == 1
    assert "1 restart(s) of the trainers" in losses.rlhpc("status", str(run.path))
    check_once(run)


@pytest.fixture
def cluster(slurm: None) -> Iterator[Cluster]:
    with Cluster.up(Settings(nodes=3)) as cluster:
        yield cluster


@pytest.mark.long
def test_one_of_two_rollout_jobs_is_preempted_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    run = ElasticRun(cluster, tmp_path, **in_jobs(2, 1, TIMEOUT))
    first, second = f"{run.rollout}_0", f"{run.rollout}_1"
    run.reach(2)
    until(lambda: run.lives(0) == run.lives(1) == 1, "both engines")
    trainer = process_of(run.run, 0)
    run.preempt(second, 20)
    until(lambda: run.queue()[second][0] == "PENDING", "the preemption")
    run.reach(newest_step(run.run) + 2)
    assert f"{first}: running" in run.rlhpc("status", str(run.run.path))
    until(lambda: run.lives(1) == 2, "its return")
    run.reach(newest_step(run.run) + 2)
    assert process_of(run.run, 0) == trainer
    assert [engine.generation for engine in run.engines] == [1, 2]
    check_once(run.run)
    run.end()


@pytest.mark.long
def test_trainers_wait_for_the_only_rollout_job_and_then_end_it(cluster: Cluster, tmp_path: Path) -> None:
    """It begins after them, and is preempted; they wait longer than any hang may last."""
    hold = cluster.submit("--partition=urgent", "--exclusive", "--nodelist=node[2-3]", script="sleep 90", cwd="/tmp")
    recovery = {**elastic(1, TIMEOUT)["recovery"], "hang_timeout_seconds": 30, "storage_wait_seconds": 10}
    keys = {**in_jobs(1, 1, TIMEOUT), "train__steps": 8, "validation__every": 4, "recovery": recovery}
    run = ElasticRun(cluster, tmp_path, **keys)
    until(lambda: phase(run.run) == "waiting for engines", "trainers that wait")
    trainer = process_of(run.run, 0)
    cluster.wait_state(hold, "COMPLETED", timeout=200)
    run.reach(2)
    run.preempt(run.rollout, 40)
    cluster.wait_state(run.job, "COMPLETED", timeout=400)
    assert process_of(run.run, 0) == trainer
    validated = [record["validation/step"] for record in records(run.run.path) if "validation/step" in record]
    assert validated == [0, 4, 8]
    check_once(run.run)
    until(lambda: not run.queue(), "the end of the rollout job")


@pytest.mark.long
def test_trainers_whose_rollout_jobs_are_all_gone_save_and_are_resumed_with_new_ones(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = ElasticRun(cluster, tmp_path, **in_jobs(1, 1, TIMEOUT))
    run.reach(3)
    cluster.run(f"scancel {run.rollout}", check=True)
    until(lambda: phase(run.run) == "waiting for engines", "trainers that wait")
    step = newest_step(run.run)
    cluster.wait_state(run.job, "COMPLETED", timeout=300)
    assert "all rollout jobs have ended; the trainers have no engines: they save and end" in run.output
    assert attempts.saved_step(run.run) == step + 2  # of supervised steps too
    run.rlhpc("resume", str(run.run.path), "train.steps=2000")
    record = read_run(run.run.path).job
    assert record is not None
    assert record.rollout_job not in ("", run.rollout)
    until(lambda: newest_step(run.run) >= step + 2, "steps of the resumed run")
    taken = steps(run.run)
    assert taken == [*range(1, len(taken) + 1)]
    run.end()


def phase(run: RunFolder) -> str:
    """Phase of the trainers' rank."""
    beats = run.attempt(1).heartbeats
    return read_beats(beats)[0].phase if beats_file(beats).exists() else ""

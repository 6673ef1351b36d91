"""A launcher that outlives its allocation leaves the run to the requeued job.

What it makes of each answer of Slurm's: tests/launch/supervise/test_allocation.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.diagnosis import Evidence, diagnose
from tests.slurm.cluster import Cluster
from tests.slurm.scontrol import wait
from tests.slurm.test_recovery import history, outcomes, submit, wait_for_ranks

pytestmark = pytest.mark.slurm
# In the place of srun: at the first call the node loses its slurmd, and Slurm gives the node up.
SRUN = """#!/bin/bash
[ {moment} = after ] && /usr/bin/srun "$@"; code=$?
if [ ! -e {folder}/lost ]; then
    touch {folder}/lost
    kill -KILL $(cat {pids}/slurmd.$SLURMD_NODENAME)
    scontrol update NodeName=$SLURMD_NODENAME State=DOWN Reason=test
fi
[ {moment} = before ] && exec /usr/bin/srun "$@"; exit $code
"""


def submit_losing(cluster: Cluster, folder: Path, program: str, moment: str) -> int:
    """A job that loses its first node before or after its first srun; its id."""
    command = folder / "bin" / "srun"
    command.parent.mkdir()
    command.write_text(SRUN.format(moment=moment, folder=folder, pids=cluster.folder / "pids"))
    command.chmod(0o700)
    path = f"--export=ALL,PATH={command.parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    return submit(cluster, folder, program, path)


def test_srun_s_words_for_a_job_without_an_allocation_are_known(cluster):
    """Of jobs in the queue, that have ended, and that never were."""
    held, ended = (cluster.submit("--hold", script="true") for _ in range(2))
    cluster.run(["scancel", str(ended)], check=True)
    for job in (held, ended, 987654):
        done = cluster.run(["srun", "--overlap", "hostname"], env={"SLURM_JOB_ID": str(job)})
        found = diagnose(Evidence(1, ("node1",), {}, done.stderr, done.returncode, 0.0))
        assert found.cause == "allocation_lost", done.stderr


@pytest.mark.long
def test_variables_of_the_job_that_has_submitted_this_one_take_nothing_away(cluster, tmp_path):
    """sbatch passes them on, and Slurm replaces only those that the new job has."""
    outer = "SLURM_RESTART_COUNT=2,SLURM_ARRAY_JOB_ID=987654,SLURM_ARRAY_TASK_ID=1"
    cluster.wait_state(submit(cluster, tmp_path, "done", f"--export=ALL,{outer}"), "COMPLETED")
    ((attempt, verdict),) = history(tmp_path)
    assert (attempt.restart_count, verdict.cause) == (0, "finished")


@pytest.mark.long
def test_a_launcher_left_behind_by_a_requeue_begins_no_attempt(cluster, tmp_path):
    """Its node has lost its slurmd, so that Slurm's SIGTERM does not reach it."""
    run, log = RunFolder(tmp_path / "run"), tmp_path / "log"
    job = submit(cluster, tmp_path, "full_disk", wait_seconds=5)
    wait(run.attempt(1).verdict.exists, "the first verdict")
    node = history(tmp_path)[0][0].nodes[0]
    cluster.kill_slurmd(node)
    cluster.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"], check=True)
    cluster.run(["scontrol", "hold", str(job)], check=True)
    wait(lambda: "this start of the job ends:" in log.read_text() or len(history(tmp_path)) > 1, "the launcher's end")
    assert "Slurm has requeued the job" in log.read_text()
    assert outcomes(tmp_path) == [("disk_full", "retry")]
    cluster.run(["scontrol", "release", str(job)], check=True)
    cluster.wait_state(job, "COMPLETED", restarts=1)
    assert outcomes(tmp_path) == [("disk_full", "retry"), ("finished", "none")]
    (_, first), (second, last) = history(tmp_path)
    assert second.restart_count >= 1, "Slurm may try the lost node again first"
    assert (first.failures, last.failures) == (1, 1)


@pytest.mark.long
def test_an_srun_that_finds_no_allocation_uses_up_no_attempt(cluster, tmp_path):
    job = submit_losing(cluster, tmp_path, "done", "before")
    wait(RunFolder(tmp_path / "run").attempt(1).verdict.exists, "the first verdict")
    assert outcomes(tmp_path) == [("allocation_lost", "none")]
    cluster.wait_state(job, "COMPLETED", restarts=1)
    assert outcomes(tmp_path) == [("allocation_lost", "none"), ("finished", "none")]
    assert history(tmp_path)[0][1].failures == 0
    assert "srun: error: " in history(tmp_path)[0][1].detail


@pytest.mark.long
def test_a_launcher_whose_run_is_taken_over_writes_no_verdict(cluster, tmp_path):
    """Its ranks end at the later attempt."""
    run = RunFolder(tmp_path / "run")
    job = submit(cluster, tmp_path, "work")
    wait_for_ranks(run)
    attempts.begin(run, job_id=str(job), restart_count=1, nodes=("node3",), world_size=1, saved_step=-1)
    cluster.wait_state(job, "FAILED")
    assert outcomes(tmp_path) == [("", ""), ("", "")]
    assert "allocation_lost: the requeued job has begun attempt 2 -> none" in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_launcher_does_not_requeue_a_job_that_slurm_has_requeued(cluster, tmp_path):
    job = submit_losing(cluster, tmp_path, "bad_node_once", "after")
    cluster.wait_state(job, "COMPLETED", restarts=1)
    assert outcomes(tmp_path) == [("bad_node", "requeue"), ("finished", "none")]
    log = (tmp_path / "log").read_text()
    assert "this start of the job ends: Slurm has requeued the job" in log
    assert "asks Slurm to requeue" not in log


@pytest.mark.long
def test_a_launcher_without_network_waits_and_leaves_when_the_requeued_job_has_begun(cluster, tmp_path):
    run, log = RunFolder(tmp_path / "run"), tmp_path / "log"
    job = submit(cluster, tmp_path, "full_disk", wait_seconds=5)
    wait(run.attempt(1).verdict.exists, "the first verdict")
    cluster.unplug(history(tmp_path)[0][0].nodes[0])
    cluster.wait_state(job, "COMPLETED", restarts=1)
    wait(lambda: "this start of the job ends: the requeued job has begun attempt 2" in log.read_text(), "its end")
    assert "waiting for Slurm's controller" in log.read_text()
    assert outcomes(tmp_path) == [("disk_full", "retry"), ("finished", "none")]

"""What verdict, log and command line say of a job that was cancelled, suspended, not requeued, or lost its launcher."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from tests.slurm.scontrol import wait
from tests.slurm.test_recovery import history, outcomes, submit, wait_for_ranks

pytestmark = pytest.mark.slurm


def status(cluster, folder: Path) -> str:
    command = [sys.executable, "-m", "rlhpc.cli.main", "status", str(folder / "run")]
    return cluster.run(command, env={"COLUMNS": "200"}, check=True).stdout


def test_a_cancelled_job_is_not_said_to_be_requeued(cluster, tmp_path):
    run = RunFolder(tmp_path / "run")
    job = submit(cluster, tmp_path, "dies_when_told")
    wait_for_ranks(run)
    cluster.run(["scancel", str(job)], check=True)
    cluster.wait_state(job, "CANCELLED")
    wait(run.attempt(1).verdict.exists, "the verdict")
    assert outcomes(tmp_path) == [("ended", "none")]
    assert "the job ended: Slurm ended the job: it was cancelled, or preempted" in status(cluster, tmp_path)


def test_a_requeue_that_slurm_refuses_is_not_said_to_be_one(cluster, tmp_path):
    """As with JobRequeue=0 of the site."""
    job = submit(cluster, tmp_path, "bad_node_once", "--no-requeue", "--nodelist=node1,node2")
    cluster.wait_state(job, "FAILED")
    assert outcomes(tmp_path) == [("bad_node", "stop")]
    shown = status(cluster, tmp_path)
    assert "; Slurm does not requeue this job; `rlhpc resume` continues the run -> stopped" in shown
    assert "requeued" not in shown
    assert "requeued" not in (tmp_path / "log").read_text()


def test_a_launcher_that_was_killed_is_not_said_to_be_a_requeue(cluster, tmp_path):
    run = RunFolder(tmp_path / "run")
    first = submit(cluster, tmp_path, "long_step", "--nodelist=node1,node2")
    wait_for_ranks(run)
    cluster.run("pkill -KILL -f launch.supervise.supervisor", node=history(tmp_path)[0][0].nodes[0], check=True)
    cluster.wait_state(first, "FAILED")
    cluster.wait_state(submit(cluster, tmp_path, "done"), "COMPLETED")
    assert outcomes(tmp_path) == [("ended", "none"), ("finished", "none")]
    assert f"the job ended: job {first} left no verdict: it was cancelled or out of time, " in status(cluster, tmp_path)


@pytest.mark.long
def test_a_job_that_was_suspended_past_its_end_goes_on(cluster, tmp_path):
    """Slurm moves the end of a job when it continues; the launcher was stopped meanwhile."""
    run = RunFolder(tmp_path / "run")
    job = submit(cluster, tmp_path, "work", "--time=1")
    wait_for_ranks(run)
    cluster.run(["scontrol", "suspend", str(job)], check=True)
    time.sleep(70)
    cluster.run(["scontrol", "resume", str(job)], check=True)
    time.sleep(15)
    assert attempts.read_verdict(run.attempt(1)) is None
    assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.run(["scancel", str(job)])

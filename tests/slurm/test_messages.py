"""What becomes of a job that was suspended."""

from __future__ import annotations

import time

import pytest

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from tests.slurm.test_recovery import submit, wait_for_ranks

pytestmark = pytest.mark.slurm


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

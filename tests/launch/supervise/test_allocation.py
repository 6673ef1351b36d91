"""Whose the job's allocation is, by what Slurm and the run folder say, and what the launcher makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise import allocation
from rlhpc.launch.supervise.allocation import SlurmAllocation, why_ending, why_moved
from rlhpc.launch.supervise.batch_job import BatchJob
from rlhpc.launch.supervise.diagnosis import Evidence

# As on Slurm 22.05, without lines that do not matter here.
SHOWN = (
    "JobId=7 JobName=x UserId=alice(7001) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "JobState={state} Reason=None NodeList=node[1-2] BatchHost={host} NumNodes=2 Command=/x/job.sh --state JobState=NO"
)
SCONTROL = """#!/bin/sh
echo x >> {calls}
[ "$(wc -l < {calls})" -gt {failures} ] && {{ printf '%s\\n' '{out}'; exit 0; }}
echo 'slurm_load_jobs error: {error}' >&2
exit 1
"""
PENDING = "srun: error: Unable to confirm allocation for job 7: Job is pending execution\n"
AWAY = "Unable to contact slurm controller (connect failure)"


def shown(state: str = "RUNNING", restarts: int = 1, host: str = "node1") -> str:
    return SHOWN.format(state=state, restarts=restarts, host=host)


class Site:
    """The second start of job 7, on node1, and a scontrol that answers as given after some failures."""

    def __init__(self, folder: Path) -> None:
        self.run, self.termination = RunFolder(folder / "run"), SimpleNamespace(requested=False)
        self.run.create()
        self.run.config.write_text("name: tiny\nmodel: {path: none}\ntrain: {steps: 1}\nslurm: {nodes: 2}\n")
        self.calls, self._command = folder / "calls", folder / "scontrol"
        job = BatchJob("7", "7", 1, (("node1", "node2"),))
        self.allocation = SlurmAllocation(self.run, job, self.termination)

    def answers(self, out: str, *, failures: int = 0, error: str = AWAY) -> None:
        self.calls.write_text("")
        self._command.write_text(SCONTROL.format(calls=self.calls, failures=failures, out=out, error=error))
        self._command.chmod(0o700)

    def begin(self, restart_count: int, job_id: str = "7") -> None:
        known = {"nodes": ("node1",), "world_size": 1, "saved_step": -1}
        attempts.begin(self.run, job_id=job_id, restart_count=restart_count, **known)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setattr(allocation, "_AGAIN_SECONDS", 0.01)
    return Site(tmp_path)


def evidence(output: str) -> Evidence:
    return Evidence(2, ("node1", "node2"), {}, output, 1, 1000.0)


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "CONFIGURING", "SUSPENDED", "COMPLETING", "TIMEOUT", "NEW"])
def test_a_job_at_its_restart_and_on_its_node_is_this_start(state):
    assert why_moved(shown(state), 1, "node1") == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (shown("PENDING", 2), "Slurm has requeued the job (restart 2, this is 1)"),
        (shown("REQUEUE_HOLD", 1), "Slurm has returned the job to the queue"),
        (shown("COMPLETING", 2), "Slurm has requeued the job (restart 2, this is 1)"),
        (shown("RUNNING", 2, "node3"), "Slurm has requeued the job (restart 2, this is 1)"),
        (shown("RUNNING", 1, "node3"), "Slurm has started the job on node3"),
    ],
)
def test_a_job_that_slurm_has_started_again_is_another_start(text, reason):
    assert why_moved(text, 1, "node1") == reason


def test_a_text_that_does_not_speak_of_the_job_takes_nothing_away():
    assert (why_moved("", 1, "node1"), why_ending("")) == ("", "")
    assert why_moved(shown().replace("BatchHost=node1 ", "").replace("Restarts=1 ", ""), 1, "node1") == ""


def test_a_job_that_is_ending_can_start_no_ranks_but_be_requeued(site):
    for state, reason in (("COMPLETING", "Slurm is ending the job"), ("TIMEOUT", "the job has ended: out of time")):
        site.answers(shown(state))
        assert (site.allocation.lost(), site.allocation.lost(to_start=False)) == (reason, "")


def test_a_job_that_slurm_does_not_know_is_lost(site):
    site.answers("", failures=1, error="Invalid job id specified")
    assert site.allocation.lost() == "Slurm no longer knows the job"


def test_an_attempt_of_a_later_restart_takes_the_run_over(site):
    site.answers(shown())
    for restart_count, job_id in ((0, "7"), (1, "7"), (5, "6")):
        site.begin(restart_count, job_id)
        assert site.allocation.lost() == ""
    site.begin(2)
    site.run.attempt(5).path.mkdir()  # a launcher's that has not written its record
    assert site.allocation.lost() == "the requeued job has begun attempt 4"


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"restart_count": null, "job_id": "7", "number": 1}'])
def test_a_damaged_record_takes_nothing_over(site, record):
    site.answers(shown())
    site.begin(0)
    site.run.attempt(1).record.write_text(record)
    assert site.allocation.lost() == ""


def test_an_unreachable_controller_is_waited_for(site):
    site.answers(shown("PENDING"), failures=3)
    assert site.allocation.lost() is None
    assert site.allocation.wait() == "Slurm has returned the job to the queue"
    assert len(site.calls.read_text().split()) == 4


def test_the_wait_ends_with_the_batch_step(site):
    site.answers(shown(), failures=1000)
    site.termination.requested = True
    assert site.allocation.wait() is None


def test_a_controller_that_answers_otherwise_is_not_waited_for(site):
    site.answers("", failures=1000, error="Access/permission denied")
    assert site.allocation.wait() == ""


def test_slurm_s_answer_decides_on_what_srun_reports(site):
    site.answers(shown("PENDING"))
    found = site.allocation.diagnose(evidence(PENDING))
    assert (found.cause, found.message) == ("allocation_lost", "Slurm has returned the job to the queue")
    assert PENDING in found.detail
    site.answers(shown())
    assert site.allocation.diagnose(evidence(PENDING)).cause == "launch"
    site.answers("", failures=1000)
    found = site.allocation.diagnose(evidence(PENDING))
    assert (found.cause, found.message) == ("allocation_lost", PENDING.strip())


def test_ranks_that_the_requeued_job_s_attempt_ended_did_not_crash(site):
    site.begin(1)
    site.begin(2)
    found = site.allocation.diagnose(evidence("srun: error: node1: task 0: Killed\n"))
    assert (found.cause, found.message) == ("allocation_lost", "the requeued job has begun attempt 2")

"""What is said of an attempt that Slurm ended, or whose launcher was killed, and of a requeue that Slurm refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.status import verdict_words
from rlhpc.launch.supervise.allocation import ended_by_slurm, stopped_by_slurm, why_ended, without_verdict
from rlhpc.launch.supervise.batch_job import BatchJob
from rlhpc.launch.supervise.diagnosis import Diagnosis
from rlhpc.launch.supervise.policy import NO_REQUEUE, Situation, decide
from rlhpc.launch.supervise.supervisor import former_verdict

# As on Slurm 22.05, without fields that do not matter here.
SHOWN = (
    "JobId=7 JobName=x Requeue={requeue} Restarts={restarts} BatchFlag=1 JobState={state} Reason={reason} "
    "Command=/x/job.sh --Reason=TimeLimit Requeue=0"
)
NO_VERDICT = "job 5 left no verdict: it was cancelled or out of time, its launcher was killed, or its node failed"
JOB = BatchJob("7", "7", 1, (("node1",),))
ATTEMPT = Attempt(3, "7", 0, ("node1",), 1, 900.0, saved_step=-1)


def shown(state: str = "COMPLETING", reason: str = "None", restarts: int = 1, requeue: int = 1) -> str:
    return SHOWN.format(state=state, reason=reason, restarts=restarts, requeue=requeue)


@pytest.fixture
def config(tmp_path: Path):
    file = tmp_path / "given.yaml"
    file.write_text("name: tiny\nmodel: {path: none}\ntrain: {steps: 1}\n")
    return load_config(file, [])


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a scontrol that prints this, or refuses."""

    def answers(out: str, code: int = 0) -> None:
        command = tmp_path / "scontrol"
        command.write_text(f"#!/bin/sh\ncat <<'END'\n{out}\nEND\nexit {code}\n")
        command.chmod(0o700)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return answers


@pytest.mark.parametrize(
    ("record", "cause", "words"),
    [
        (shown(), "ended", "cancelled, or preempted"),
        (shown("CANCELLED"), "ended", "cancelled, or preempted"),
        (shown(restarts=2), "requeued", "Slurm has requeued the job"),
        (shown("PENDING"), "requeued", "returned the job to the queue"),
        (shown(reason="TimeLimit"), "time_limit", "the job's time ended"),
        ("", "ended", "Slurm ended the job"),
    ],
)
def test_slurm_says_why_it_ended_the_job(record: str, cause: str, words: str) -> None:
    found = why_ended(record, 1)
    assert found.cause == cause
    assert words in found.message


def test_a_cancelled_job_is_not_said_to_be_requeued(scontrol, config) -> None:
    scontrol(shown())
    verdict = decide(ended_by_slurm(JOB), config, Situation(ATTEMPT, None, -1, 0.0, 60.0))
    words = verdict_words(verdict)
    assert words == "the job ended: Slurm ended the job: it was cancelled, or preempted"


@pytest.mark.parametrize(("restarts", "cause"), [(1, "stopped"), (2, "requeued")])
def test_ranks_that_had_time_to_stop_are_requeued_if_slurm_says_so(scontrol, restarts: int, cause: str) -> None:
    stopped = Diagnosis("stopped", "the ranks agreed to stop", stopped="terminated")
    scontrol(shown(restarts=restarts))
    found = stopped_by_slurm(stopped, JOB)
    assert found.cause == cause
    assert found == stopped or found.message.startswith("checkpointed; Slurm has requeued the job")


@pytest.mark.parametrize(
    ("attempt_job", "restarts", "cause", "words"),
    [
        ("7", 0, "requeued", "the job was requeued: a node failed, it was preempted, or a user requeued it"),
        ("7", 1, "ended", "the launcher of this job left no verdict: it was killed"),
        ("5", 0, "ended", NO_VERDICT),
        ("", 0, "ended", "`rlhpc run` left no verdict: it was killed, or its machine failed"),
    ],
)
def test_a_launcher_that_was_killed_is_not_a_requeue(attempt_job: str, restarts: int, cause: str, words: str) -> None:
    attempt = Attempt(3, attempt_job, restarts, ("node1",), 1, 900.0, saved_step=-1)
    assert without_verdict(attempt, JOB) == Diagnosis(cause, words)


@pytest.mark.parametrize(("attempt_job", "action", "failures"), [("7", "requeue", 1), ("5", "none", 0)])
def test_a_new_job_counts_from_zero_after_a_launcher_without_a_verdict(
    tmp_path: Path, config, attempt_job: str, action: str, failures: int
) -> None:
    run = RunFolder(tmp_path / "run")
    attempts.begin(run, job_id=attempt_job, restart_count=0, nodes=("node1",), world_size=1, saved_step=-1)
    former = former_verdict(run, JOB, config, 60.0)
    assert former is not None
    assert (former.verdict.action, former.verdict.failures) == (action, failures)
    assert former.unwritten is not None
    assert former.unwritten.failures == 1
    assert attempts.read_verdict(run.attempt(1)) is None, "the caller writes it"


def test_restarts_of_trainers_within_the_attempt_count_after_a_launcher_without_a_verdict(
    tmp_path: Path, config
) -> None:
    run = RunFolder(tmp_path / "run")
    attempt = attempts.begin(
        run, job_id="7", restart_count=0, nodes=("node1",), world_size=1, saved_step=-1, excluded=()
    )
    attempts.begin_again(attempt, Verdict(1.0, "crash", "killed", "retry", failures=1))
    former = former_verdict(run, JOB, config, 60.0)
    assert former is not None
    assert former.verdict.failures == 2


@pytest.mark.parametrize(("requeue", "may"), [(1, True), (0, False)])
def test_slurm_says_whether_it_requeues_the_job(scontrol, requeue: int, may: bool) -> None:
    scontrol(shown("RUNNING", requeue=requeue))
    assert JOB.may_requeue() is may


def test_without_an_answer_a_requeue_is_tried(scontrol) -> None:
    scontrol("", code=1)
    assert JOB.may_requeue()


@pytest.mark.parametrize("cause", ["time_limit", "preempted"])
def test_a_job_that_slurm_does_not_requeue_is_not_said_to_be(config, cause) -> None:
    situation = Situation(ATTEMPT, None, -1, 0.0, 60.0, no_requeue=NO_REQUEUE)
    verdict = decide(Diagnosis(cause, "checkpointed"), config, situation)
    assert verdict_words(verdict).endswith(
        ": checkpointed; Slurm does not requeue this job; `rlhpc resume` continues the run -> stopped"
    )


def test_a_lost_node_requeues_no_job_that_slurm_does_not_requeue(config) -> None:
    situation = Situation(ATTEMPT, None, -1, 0.0, 60.0, no_requeue=NO_REQUEUE)
    verdict = decide(Diagnosis("requeued", "node node1 failed"), config, situation)
    assert (verdict.cause, verdict.action) == ("ended", "none")
    assert verdict_words(verdict) == "the job ended: node node1 failed"

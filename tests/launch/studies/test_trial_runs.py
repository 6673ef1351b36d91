"""What has become of a trial, by its run folder and what Slurm knows of its job; and the hours that it has cost."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run_registry import JobRecord, RunEntry
from rlhpc.launch.slurm.queue import JobStatus
from rlhpc.launch.studies.trial_runs import rank_hours, state_of

SUBMITTED = 1000.0
RECORD = JobRecord("7", "", SUBMITTED, "user", "search-0", "/tmp", "")


def begun(folder: Path, *verdicts: tuple[str, str, float] | None) -> RunFolder:
    """A run with an attempt for each verdict: cause, action, time; None: it has none."""
    run = RunFolder(folder).create()
    for verdict in verdicts:
        attempt = attempts.begin(run, job_id="7", restart_count=0, nodes=("n",), world_size=4, saved_step=-1)
        if verdict is not None:
            cause, action, when = verdict
            attempts.end(attempt, Verdict(when, cause, "", action))  # type: ignore[arg-type]
    return run


@pytest.mark.parametrize(
    ("verdicts", "job", "expected"),
    [
        ((), "PENDING", ("queued", "")),
        ((None,), "RUNNING", ("running", "")),
        ((("finished", "none", 2000.0),), "RUNNING", ("finished", "")),
        ((("hang", "stop", 2000.0),), "RUNNING", ("failed", "hang")),  # its own job's last act
        ((("hang", "retry", 2000.0),), "RUNNING", ("running", "")),
        ((("bad_node", "requeue", 2000.0),), "PENDING", ("queued", "")),
        ((("hang", "stop", 500.0),), "PENDING", ("queued", "")),  # of before it was submitted again
        ((("bad_node", "requeue", 2000.0),), "CANCELLED", ("failed", "bad_node")),
        ((None,), "NODE_FAIL", ("failed", "ended")),
        ((None,), None, ("failed", "ended")),
    ],
)
def test_a_trial_is_what_its_folder_and_the_queue_say(
    tmp_path: Path, verdicts: Any, job: str | None, expected: tuple[str, str]
) -> None:
    run = begun(tmp_path / "run", *verdicts)
    found = state_of(RunEntry(run, RECORD), JobStatus("7", job) if job is not None else None)
    assert (found.phase, found.cause) == expected


def test_a_trial_without_a_job_and_attempts_has_not_begun(tmp_path: Path) -> None:
    assert state_of(RunEntry(begun(tmp_path / "run"), None), None).phase == "new"


def test_hours_of_an_attempt_without_a_verdict_do_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now - 1800)
        begun(tmp_path / "run", None)
    run = begun(tmp_path / "run", ("hang", "stop", now + 3600))
    assert rank_hours(run, running=False) == pytest.approx(2.0 + 4.0, rel=0.01)  # the first until the second began
    lost = begun(tmp_path / "lost", None)
    assert rank_hours(lost, running=False) == 0.0
    lost.metrics.touch()
    os.utime(lost.metrics, (now + 1800, now + 1800))
    assert rank_hours(lost, running=False) == pytest.approx(2.0, rel=0.01)
    assert rank_hours(lost, running=True) < 0.1

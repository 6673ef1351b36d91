"""The job's end reaches the ranks, also after a time in which it could not be written or read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhpc.core.files import read_json
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise import batch_job
from rlhpc.launch.supervise.batch_job import BatchJob, Deadline


class Job(BatchJob):
    """A job whose end is known without Slurm."""

    end = 2e9

    def end_time(self) -> float | None:
        return self.end


def test_an_end_that_could_not_be_written_is_written_at_the_next_look(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    deadline = Deadline(Job("7", "7", 0, (("node1",),)))
    began = time.monotonic()
    deadline.follow(attempt)  # its folder does not exist
    assert time.monotonic() - began < 60, "the launcher does not wait for it"
    attempt.path.mkdir(parents=True)
    deadline.look()
    assert read_json(attempt.deadline) == {"end": 2e9}
    written = attempt.deadline.stat().st_ino
    deadline.look()
    assert attempt.deadline.stat().st_ino == written, "only news are written"
    Job.end = 1.9e9
    deadline.look()
    assert read_json(attempt.deadline) == {"end": 1.9e9}


@pytest.mark.parametrize("constant", ["_CONFIRM_SECONDS", "_PAUSE_SECONDS"])
def test_an_end_from_before_a_suspension_is_asked_again(
    constant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is near or past by then; a long suspension is noticed by the time since the last look."""
    monkeypatch.setattr(Job, "end", time.time() + 5)
    deadline = Deadline(Job("7", "7", 0, (("node1",),)))
    monkeypatch.setattr(Job, "end", time.time() + 3600)
    assert deadline.seconds_left() < 6, "it was asked a moment ago"
    monkeypatch.setattr(batch_job, constant, -1.0)
    assert deadline.seconds_left() > 3000

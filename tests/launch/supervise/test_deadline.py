"""The job's end reaches the ranks, also after a time in which it could not be written or read."""

from __future__ import annotations

import time
from pathlib import Path

from rlhpc.core.files import read_json
from rlhpc.core.folder import RunFolder
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

"""Whether a batch step is of the job that the run's record names."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.allocation import other_job, wait_for_record
from rlhpc.launch.supervise.batch_job import BatchJob

JOB, ELEMENT = BatchJob("8", "8", 0, (("node1",),)), BatchJob("10", "9_3", 0, (("node1",),))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def record(run: RunFolder, job_id: str) -> None:
    write_json(run.job, {"job_id": job_id})


@pytest.mark.parametrize(("job", "known"), [(JOB, "8"), (ELEMENT, "9_3"), (JOB, "")])
def test_the_runs_own_job_works(run: RunFolder, job: BatchJob, known: str) -> None:
    record(run, known)
    assert wait_for_record(run, job, lambda: False) == ""


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "{}"])
def test_without_a_record_any_job_works(run: RunFolder, text: str | None) -> None:
    """Of a plain sbatch script, or damaged."""
    if text is not None:
        run.job.write_text(text)
    assert other_job(run, JOB) == ""


@pytest.mark.heavy
@pytest.mark.parametrize(("job", "known"), [(JOB, "7"), (JOB, "8_1"), (ELEMENT, "9_2"), (ELEMENT, "9")])
def test_another_job_is_named(run: RunFolder, job: BatchJob, known: str) -> None:
    record(run, known)
    words = f"this is job {job.name}, but {run.job} names job {known} as the run's"
    assert wait_for_record(run, job, lambda: False, seconds=0.1).startswith(words)


def test_a_job_that_starts_before_its_record_waits_for_it(run: RunFolder) -> None:
    record(run, "7")
    threading.Timer(0.3, record, (run, "8")).start()
    assert wait_for_record(run, JOB, lambda: False) == ""


def test_the_wait_for_the_record_ends_with_the_job(run: RunFolder) -> None:
    record(run, "7")
    began = time.monotonic()
    assert wait_for_record(run, JOB, lambda: True)
    assert time.monotonic() - began < 30

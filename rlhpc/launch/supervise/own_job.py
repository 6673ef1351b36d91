"""Compares the job that a run's record names with the batch step's own: two jobs in one folder would fence each other.

`rlhpc submit` writes the record just after Slurm has accepted the job, which may have started by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhpc.core.files import read_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import NONE
from rlhpc.launch.supervise.batch_job import BatchJob

_RECORD_SECONDS, _POLL_SECONDS = 60.0, 0.2  # a network file system may show an old record for a while


def other_job(run: RunFolder, job: BatchJob) -> str:
    """Why the run is not this job's, in words; empty if it is, and without a record that can be read."""
    try:
        known = read_json(run.job, NONE)["job_id"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    if known in (job.name, job.job_id, ""):
        return ""
    return f"this is job {job.name}, but {run.job} names job {known} as the run's; only one job works in a run folder"


def wait_for_record(
    run: RunFolder, job: BatchJob, is_ending: Callable[[], bool], seconds: float = _RECORD_SECONDS
) -> str:
    """``other_job``, once the record names this job or has had time to."""
    end = time.monotonic() + seconds
    while (other := other_job(run, job)) and time.monotonic() < end and not is_ending():
        time.sleep(_POLL_SECONDS)
    return other

"""``rlhpc cancel``: cancels a run's job, with or without a last checkpoint."""

from __future__ import annotations

import time

from rlhpc.core.errors import UserError
from rlhpc.core.files import write_atomic
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.slurm.commands import ask, last_line
from rlhpc.launch.slurm.queue import JobStatus, read_job

_GONE_SECONDS, _POLL_SECONDS = 3.0, 0.2


def cancel(run: RunEntry, *, save: bool = False) -> str:
    """Cancels the run's job and returns the result in words. ``save``: the ranks save and end by themselves.

    scancel succeeds for unknown ids too, so the queue is read before and after.
    """
    if run.job is None:
        raise UserError("was never submitted", where=str(run.folder.path), remedy="end `rlhpc run` with Ctrl-C")
    job_id, cluster = run.job.job_id, run.job.cluster
    status = read_job(job_id, cluster)
    if status is None:
        raise UserError(f"Slurm no longer knows job {job_id}", where=run.name, remedy="see `rlhpc status`")
    if not status.live:
        raise UserError(f"job {job_id} is over ({status.words})", where=run.name, remedy="see `rlhpc status`")
    if save and status.state == "RUNNING":
        # Written first: when the ranks have ended, the supervisor must not start them again.
        write_atomic(run.folder.stop_requested, f"{time.time()}\n")
        _scancel("--signal=USR2", job_id, cluster=cluster)
        return f"job {job_id}: its ranks save after the current step and end; see `rlhpc status {job_id}`"
    _scancel(job_id, *([run.job.rollout_job] if run.job.rollout_job else []), cluster=cluster)
    after = _wait(job_id, cluster)
    if after is not None and after.live:
        return f"job {job_id} was asked to end and is {after.words}"
    return f"job {job_id} was cancelled"


def _scancel(*arguments: str, cluster: str) -> None:
    answer = ask("scancel", *arguments, cluster=cluster)
    if answer.code:
        raise UserError(f"scancel failed: {last_line(answer.err)}", where="slurm", remedy="see `squeue --me`")


def _wait(job_id: str, cluster: str) -> JobStatus | None:
    deadline = time.monotonic() + _GONE_SECONDS
    while True:
        status = read_job(job_id, cluster)
        if status is None or not status.live or time.monotonic() > deadline:
            return status
        time.sleep(_POLL_SECONDS)

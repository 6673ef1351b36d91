"""Why an attempt ended if neither its ranks nor srun say it: Slurm ended the job, or the launcher was killed."""

from __future__ import annotations

import re
from dataclasses import replace

from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError
from rlhpc.launch.slurm.commands import ask
from rlhpc.launch.slurm.queue import job_record
from rlhpc.launch.supervise.allocation import why_moved
from rlhpc.launch.supervise.batch_job import BatchJob
from rlhpc.launch.supervise.diagnosis import Diagnosis

_ASK_SECONDS = 4.0  # Slurm kills this process some seconds after its SIGTERM
_REASON = re.compile(r"\sReason=(\S+)")


def ended_by_slurm(job: BatchJob) -> Diagnosis:
    """Diagnosis for ranks that Slurm has ended, when it has sent SIGTERM to the batch step."""
    try:
        answer = ask("scontrol", "show", "job", "-o", job.job_id, seconds=_ASK_SECONDS)
    except UserError:
        return why_ended("", job.restart_count)
    return why_ended(job_record(answer.out, job.job_id), job.restart_count)


def stopped_by_slurm(diagnosis: Diagnosis, job: BatchJob) -> Diagnosis:
    """Diagnosis for ranks that had the time to stop at Slurm's SIGTERM: the same, unless it has requeued the job."""
    ended = ended_by_slurm(job)
    return replace(ended, message=f"checkpointed; {ended.message}") if ended.cause == "requeued" else diagnosis


def why_ended(record: str, restart_count: int) -> Diagnosis:
    """The same from the job's line of ``scontrol show job -o``, which is the same for a job that is being cancelled and
    one that is preempted for good. Pure."""
    if moved := why_moved(record, restart_count, ""):
        return Diagnosis("requeued", moved)
    reason = _REASON.search(record)
    if reason is not None and reason[1] == "TimeLimit":
        return Diagnosis("time_limit", "the job's time ended within a step")
    return Diagnosis("ended", "Slurm ended the job: it was cancelled, or preempted")


def without_verdict(attempt: Attempt, job: BatchJob) -> Diagnosis:
    """Diagnosis for an earlier attempt whose launcher has left no verdict. ``job``: the present one."""
    if attempt.job_id != job.job_id:
        if not attempt.job_id:
            return Diagnosis("ended", "`rlhpc run` left no verdict: it was killed, or its machine failed")
        why = "it was cancelled or out of time, its launcher was killed, or its node failed"
        return Diagnosis("ended", f"job {attempt.job_id} left no verdict: {why}")
    if attempt.restart_count < job.restart_count:
        return Diagnosis("requeued", "the job was requeued: a node failed, it was preempted, or a user requeued it")
    return Diagnosis("ended", "the launcher of this job left no verdict: it was killed")

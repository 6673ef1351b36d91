"""The job's allocation: its loss to a later start of the job or to another job, and its end by Slurm.

Slurm requeues a job when it loses one of its nodes, but the batch step may live on there, without network or slurmd for
a while. Meanwhile the job waits in the queue, or runs elsewhere: this start of it must not begin another attempt.
Two jobs in one run folder would fence each other, so only the job that the run's record names works there.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace

from rlhpc.core import env
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError
from rlhpc.core.files import names_in, read_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.storage import NONE, say
from rlhpc.launch.slurm.commands import AWAY, ask
from rlhpc.launch.slurm.queue import job_record, parse_scontrol
from rlhpc.launch.supervise.batch_job import BatchJob, own_record
from rlhpc.launch.supervise.diagnosis import Diagnosis, Evidence, diagnose

_COMMAND_SECONDS = 30.0
_AWAY_SECONDS, _AGAIN_SECONDS = 600.0, 2.0  # wait for an unreachable controller; between two questions
_UNKNOWN = "Invalid job id specified"
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
_BATCH_HOST = re.compile(r"\sBatchHost=(\S+)")
_ASK_SECONDS = 4.0  # Slurm kills this process some seconds after its SIGTERM
_REASON = re.compile(r"\sReason=(\S+)")
_RECORD_SECONDS, _POLL_SECONDS = 60.0, 0.2  # a network file system may show an old record for a while


class Allocation:
    """The job's allocation, as Slurm and the run folder know it. ``is_ending``: true once Slurm has sent SIGTERM."""

    def __init__(self, job: BatchJob, run: RunFolder, is_ending: Callable[[], bool]) -> None:
        self._job, self._run, self._is_ending = job, run, is_ending

    def taken_over(self) -> str:
        """The attempt that a later start of the job has begun, in words; empty if there is none, or it is unknown."""
        try:
            for name in reversed(names_in(self._run.attempts, patience=NONE)):
                record = AttemptFolder(self._run.attempts / name).record
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    newest = read_json(record, NONE)
                    later = newest["restart_count"] > self._job.restart_count
                    is_ours = newest["job_id"] == self._job.job_id
                    return f"the requeued job has begun attempt {newest['number']}" if is_ours and later else ""
        except (OSError, ValueError, LookupError, TypeError):
            pass  # the file system fails or has a damaged record; whoever writes next waits for it
        return ""

    def lost(self, *, to_start: bool = True) -> str | None:
        """Reason why the allocation is not this start's own; empty if it is, None if Slurm does not answer.

        ``to_start``: also lost if Slurm is ending the job, which can then start no ranks but still be requeued.
        """
        if taken_over := self.taken_over():
            return taken_over
        try:
            answer = ask("scontrol", "show", "job", "-o", self._job.job_id, seconds=_COMMAND_SECONDS)
        except UserError:
            return None
        if answer.code:
            if _UNKNOWN in answer.err:
                return "Slurm no longer knows the job"
            return None if AWAY.search(answer.err) else ""
        record = job_record(answer.out, self._job.job_id)
        moved = why_moved(record, self._job.restart_count, os.environ.get(env.SLURMD_NODENAME, ""))
        return moved or (why_ending(record) if to_start else "")

    def wait(self, *, to_start: bool = True) -> str | None:
        """``lost`` once Slurm answers; None if it has not within ten minutes, or ends this batch step meanwhile."""
        end, lost = time.monotonic() + _AWAY_SECONDS, self.lost(to_start=to_start)
        if lost is None:
            say("waiting for Slurm's controller")
        while lost is None and time.monotonic() < end and not self._is_ending():
            time.sleep(_AGAIN_SECONDS)
            lost = self.lost(to_start=to_start)
        return lost

    def diagnose(self, evidence: Evidence) -> Diagnosis:
        """The diagnosis, with Slurm's own answer if srun reports that the allocation is lost."""
        diagnosis = diagnose(evidence)
        if diagnosis.cause == "finished":
            return diagnosis
        if taken_over := self.taken_over():
            return Diagnosis("allocation_lost", taken_over)
        if diagnosis.cause != "allocation_lost":
            return diagnosis
        lost = self.lost()
        if lost == "":
            return diagnose(evidence, has_allocation=True)
        return replace(diagnosis, message=lost or diagnosis.message)


def why_moved(record: str, restart_count: int, host: str) -> str:
    """Reason why a job is not, or no longer, at this restart with its batch step on node ``host``, by its line of
    ``scontrol show job -o``; empty if it is, or if the line does not show it. Pure."""
    for status in parse_scontrol(record).values():
        if status.restarts not in (None, restart_count):  # queued, running elsewhere, or still being ended here
            return f"Slurm has requeued the job (restart {status.restarts}, this is {restart_count})"
        if status.queued:
            return "Slurm has returned the job to the queue"
        batch_host = _BATCH_HOST.search(record)
        if host and batch_host is not None and batch_host[1] != host:
            return f"Slurm has started the job on {batch_host[1]}"
    return ""


def why_ending(record: str) -> str:
    """Reason why a job can start no more ranks, by its line of ``scontrol show job -o``; empty if it can. Pure."""
    for status in parse_scontrol(record).values():
        if status.state == "COMPLETING":
            return "Slurm is ending the job"
        if status.state in _ENDED:
            return f"the job has ended: {status.words}"
    return ""


def ended_by_slurm(job: BatchJob) -> Diagnosis:
    """Diagnosis for ranks that Slurm has ended, when it has sent SIGTERM to the batch step."""
    return why_ended(own_record(job.job_id, _ASK_SECONDS), job.restart_count)


def stopped_by_slurm(diagnosis: Diagnosis, job: BatchJob) -> Diagnosis:
    """Diagnosis for ranks that had the time to stop at Slurm's SIGTERM: unchanged, unless it has requeued the job."""
    ended = ended_by_slurm(job)
    return replace(ended, message=f"checkpointed; {ended.message}") if ended.cause == "requeued" else diagnosis


def why_ended(record: str, restart_count: int) -> Diagnosis:
    """Diagnosis by the job's line of ``scontrol show job -o``, which is the same for a job that is being cancelled and
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


def other_job(run: RunFolder, job: BatchJob) -> str:
    """The other job that the run's record names, in words; empty if it names this one, or cannot be read."""
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
    """``other_job``, after time for the record to name this job.

    `rlhpc submit` writes the record just after Slurm has accepted the job, which may have started by then.
    """
    end = time.monotonic() + seconds
    while (other := other_job(run, job)) and time.monotonic() < end and not is_ending():
        time.sleep(_POLL_SECONDS)
    return other

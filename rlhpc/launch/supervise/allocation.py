"""Allocations: the nodes of a run, what a supervisor asks about them, and a Slurm job's loss or end.

Slurm requeues a job when it loses one of its nodes, but the batch step may live on there, without network or slurmd for
a while. Meanwhile the job waits in the queue, or runs elsewhere: this start of it must not begin another attempt.
Two jobs in one run folder would fence each other, so only the job that the run's record names works there.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from rlhpc.config.load import absolute_paths, load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.files import names_in, read_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.shown import read_report
from rlhpc.core.storage import NONE, exists, say
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.container import check_runtime
from rlhpc.launch.roles import outlives_nodes
from rlhpc.launch.slurm.commands import AWAY, ask
from rlhpc.launch.slurm.queue import job_record, parse_scontrol
from rlhpc.launch.supervise import batch_job, rollout_jobs
from rlhpc.launch.supervise.batch_job import BatchJob, Deadline, JobGuards, Termination, own_record, rendezvous_host
from rlhpc.launch.supervise.diagnosis import Diagnosis, Evidence, diagnose
from rlhpc.launch.supervise.job_ranks import PartStart
from rlhpc.launch.supervise.job_store import StoreServer, preferred_port
from rlhpc.launch.supervise.node_environment import EnvironmentPlace, NotPlaced, environment_on_nodes, remove_from_nodes
from rlhpc.launch.supervise.policy import NO_REQUEUE
from rlhpc.launch.supervise.step_ranks import StepStart
from rlhpc.observe.alerts.job import stopping_alert

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
# A stop this near to the job's end is due to it (`--signal` of the script, which Slurm may send a minute early); ranks
# that still run in the last seconds will not stop in time.
_NEAR_END_SECONDS, LAST_SECONDS = 240.0, 4.0
Start = tuple[PartStart, StoreServer]


class Allocation(Protocol):
    """Nodes of a run, as its supervisor knows them. These are the answers of nodes that have no end and that nothing
    takes away.

    ``is_ending``: no further attempt may begin; ``is_watched``: ranks run and are watched.
    """

    run: RunFolder
    nodes: tuple[str, ...]
    job_id: str = ""
    restart_count: int = 0
    is_watched: bool = False

    @property
    def is_ending(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        """True if ranks cannot work any more."""
        return self.is_ending or self.seconds_left() < LAST_SECONDS

    @property
    def may_retry(self) -> bool:
        """True if the attempt that has ended may be followed by another one here."""
        return True

    def load(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The run's configuration on so many nodes. ``overrides``: changes by recovery."""
        config = absolute_paths(load_config(self.run.config, overrides))
        return rollout_jobs.in_job_of(len(self.nodes), config)

    def usable_nodes(self, config: RunConfig, present: int) -> int:
        """Number of the ``present`` nodes that the run can use; 0 if they are too few."""
        return present

    @contextlib.contextmanager
    def guarded(self, config: RunConfig) -> Iterator[None]:
        """Context of all attempts."""
        yield

    def starting(self, folder: AttemptFolder, config: RunConfig, attempt: Attempt) -> AbstractContextManager[Start]:
        """Context of an attempt, with the start of its ranks and its store. Raises UserError, or NotPlaced."""

    def look(self, phase: str) -> None:
        """Is called while ranks run. ``phase``: that of the first rank."""

    def signal_ranks(self) -> None:
        """Sends every rank the signal at which it writes its stacks."""
        return None

    def seconds_left(self) -> float:
        """Seconds until the end; infinite without one."""
        return float("inf")

    def diagnose(self, evidence: Evidence) -> Diagnosis:
        """Diagnosis of an attempt that has ended, with what is known of the nodes."""
        diagnosis = diagnose(evidence)
        if diagnosis.stopped == "alert":
            return replace(diagnosis, message=f"checkpointed and ended by {stopping_alert(self.run)}")
        return diagnosis

    def partition_nodes(self) -> tuple[str, ...]:
        """Nodes that may replace one of these; empty if unknown."""
        return ()

    def no_requeue(self) -> str:
        """Reason why a requeue is impossible, with the remedy; empty if it is possible."""

    def requeue(self, excluded: Sequence[str]) -> bool:
        """Requeues the job and returns whether it worked."""
        return False

    def taken_over(self) -> str:
        """Later start of the job that works in the run folder, in words; empty without one."""
        return ""

    def lost_at_start(self) -> str:
        """Reason why the first attempt may not begin; empty if it may."""
        return ""

    def wait(self, *, to_start: bool = True) -> str | None:
        """Reason why no further attempt may begin; empty if it may, None without an answer."""
        return ""

    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes that were lost since the start."""
        return ()

    def log(self, text: str, *, routine: bool = False) -> None:
        """Prints a line. ``routine``: of a step that every run takes."""

    def end(self, verdict: Verdict) -> int:
        """Reports the end of the run, or of this job's work on it; returns the exit code."""


class SlurmAllocation(Allocation):
    """Allocation of the job whose batch step this is, as Slurm and the run folder know it. ``entry``: the ranks'
    program."""

    def __init__(self, run: RunFolder, job: BatchJob, termination: Termination, entry: str = "") -> None:
        self.run, self.nodes = run, job.nodes
        self._job, self._termination, self._entry = job, termination, entry
        self.job_id, self.restart_count = job.job_id, job.restart_count
        self._slurm = self.load().slurm
        self._host, self._deadline = rendezvous_host(self._slurm), Deadline(job)
        self._environment: EnvironmentPlace | None = None

    @property
    def is_ending(self) -> bool:
        return self._termination.requested

    def usable_nodes(self, config: RunConfig, present: int) -> int:
        return rollout_jobs.usable_nodes(config, present)

    @contextlib.contextmanager
    def guarded(self, config: RunConfig) -> Iterator[None]:
        """Context with guards, if the job goes on without a node; no environment is left at its end."""
        guards = JobGuards(self._job) if outlives_nodes(config) else None
        try:
            yield
        finally:
            if self._environment is not None and not self.is_ending:
                remove_from_nodes(self._environment, self.nodes)
            if guards is not None:
                guards.end()

    @contextlib.contextmanager
    def starting(self, folder: AttemptFolder, config: RunConfig, attempt: Attempt) -> Iterator[Start]:
        self._deadline.follow(folder)
        self._others = rollout_jobs.RolloutJobsWatch(self.run, config)
        size, nodes, groups = attempt.world_size, attempt.nodes, self._job.groups
        store = StoreServer.open(config.slurm.port or preferred_port(int(self.job_id)))
        address = StoreAddress(self._host, store.port, store.secret)
        try:
            check_runtime(config)
            with (
                environment_on_nodes(config, attempt, self._job, lambda: self.is_over) as place,
                rollout_jobs.shared(folder, config, address),
            ):
                self._environment = place
                how = StepStart(config, folder, size, nodes, groups, self._entry, address, self._end_step, place)
                yield how, store
        except NotPlaced as error:
            self._environment = error.place
            raise
        finally:
            store.close()

    def look(self, phase: str) -> None:
        if reason := self._others.look():
            self.log(f"{reason}; the trainers have no engines: they save and end")
            self.run.stop_requested.touch()
            self._job.ask_ranks_to_stop()

    def signal_ranks(self) -> None:
        self._job.signal_ranks()

    def seconds_left(self) -> float:
        return self._deadline.seconds_left()

    def partition_nodes(self) -> tuple[str, ...]:
        return self._job.partition_nodes()

    def no_requeue(self) -> str:
        return "" if self.is_ending or self._job.may_requeue() else NO_REQUEUE

    def requeue(self, excluded: Sequence[str]) -> bool:
        return self._job.requeue([*self._slurm.exclude, *excluded] if excluded else [])

    def lost_at_start(self) -> str:
        return wait_for_record(self.run, self._job, lambda: self.is_ending) or self.lost() or ""

    def lost_nodes(self) -> tuple[str, ...]:
        return self._job.lost_nodes()

    def log(self, text: str, *, routine: bool = False) -> None:
        batch_job.log(text)

    def end(self, verdict: Verdict) -> int:
        if self.is_ending:
            self.log("Slurm ends this job")
            return 1
        rollout_jobs.cancel_all(self.run)
        if verdict.cause == "finished":
            self.log(f"finished\n{read_report(self.run)}".rstrip())
            return 0
        if verdict.action == "stop":
            where = f"rank {verdict.rank} on {verdict.node}: " if verdict.rank >= 0 else ""
            self.log(f"stopped ({verdict.cause.replace('_', ' ')}): {where}{verdict.message}")
            return EXIT_USER_ERROR if verdict.cause in ("user", "data") else 1
        self.log(f"ended: {verdict.message}")
        return 0

    def _end_step(self, name: str) -> None:
        """Ends a job step whose srun is stuck, or all of them."""
        self.log("srun does not end: it is killed")
        if not self.lost(to_start=False):  # else these are the ranks of the requeued job
            self._job.end_ranks(name)

    def taken_over(self) -> str:
        """The attempt that a later start of the job has begun, in words; empty if there is none, or it is unknown."""
        try:
            for name in reversed(names_in(self.run.attempts, patience=NONE)):
                record = AttemptFolder(self.run.attempts / name).record
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
        if other := other_job(self.run, self._job):
            return other
        end, lost = time.monotonic() + _AWAY_SECONDS, self.lost(to_start=to_start)
        if lost is None:
            say("waiting for Slurm's controller")
        while lost is None and time.monotonic() < end and not self.is_ending:
            time.sleep(_AGAIN_SECONDS)
            lost = self.lost(to_start=to_start)
        return lost

    def diagnose(self, evidence: Evidence) -> Diagnosis:
        return self._explain(self._confirmed(super().diagnose(evidence), evidence))

    def _confirmed(self, diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
        """The diagnosis, with Slurm's own answer if srun reports that the allocation is lost."""
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

    def _explain(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis corrected by the state of the job: Slurm may have ended it, or its time may be over."""
        left, stopped = self.seconds_left(), diagnosis.cause == "stopped"
        has_time = diagnosis.cause == "allocation_lost" and left > LAST_SECONDS + 1
        if diagnosis.cause == "finished" or diagnosis.stopped == "alert" or has_time:
            return diagnosis
        if stopped and not self.is_ending:
            self._deadline.look()
            left = self.seconds_left()
            if diagnosis.stopped == "terminated":
                return replace(diagnosis, cause="preempted", message="checkpointed and ended on Slurm's warning")
            near_end = left < _NEAR_END_SECONDS and not exists(self.run.stop_requested)
            if diagnosis.stopped == "deadline" or near_end:
                return replace(diagnosis, cause="time_limit", message="checkpointed before the job's time limit")
        if stopped and diagnosis.stopped == "terminated":  # Slurm gave the ranks the time
            return stopped_by_slurm(diagnosis, self._job)
        if stopped:
            return diagnosis
        if self.is_ending:
            return ended_by_slurm(self._job)
        if left < LAST_SECONDS + 1:
            return Diagnosis("time_limit", "the job's time ended within a step", detail=diagnosis.detail)
        return diagnosis


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


def without_verdict(attempt: Attempt, job: BatchJob | Allocation) -> Diagnosis:
    """Diagnosis for an earlier attempt whose launcher has left no verdict. ``job``: the present one."""
    if not attempt.job_id:
        return Diagnosis("ended", "`rlhpc run` left no verdict: it was killed, or its machine failed")
    if attempt.job_id != job.job_id:
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

"""State of runs, from Slurm and from their run folders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Best, Verdict
from rlhpc.core.records import MetricsFile
from rlhpc.core.text import duration
from rlhpc.launch.run_lock import is_locked
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.slurm.commands import clock
from rlhpc.launch.slurm.queue import JobStatus, read_jobs
from rlhpc.launch.supervise.engine_losses import EnginesRecord, read_engines
from rlhpc.observe.alerts.record import Alert, read_alerts
from rlhpc.observe.engine_activity import SidesStatus, read_sides
from rlhpc.observe.progress import last_number

RECENT_STEPS = 50  # in which the newest values are looked for
_ALERTS = 5  # newest ones
_CLOCKS_SECONDS = 60.0  # maximum difference between clocks of login and compute nodes
CAUSE_WORDS = {
    "finished": "finished",
    "user": "wrong input, or an error in the user's code",
    "data": "wrong data",
    "non_finite": "gradients or weights are not finite",
    "gpu_memory": "out of GPU memory",
    "cpu_memory": "out of CPU memory",
    "network": "the network or a collective failed",
    "stranger": "another program took the places of ranks",
    "bad_node": "a node failed",
    "hang": "no progress",
    "disk_full": "disk full",
    "storage": "the file system failed",
    "crash": "a rank crashed",
    "launch": "the ranks could not be started",
    "allocation_lost": "the job's allocation was lost",
    "time_limit": "the job's time ended",
    "preempted": "preempted",
    "stopped": "stopped on request",
    "requeued": "requeued",
    "ended": "the job ended",
}


@dataclass(frozen=True)
class AttemptStatus:
    """One attempt with its verdict, None while the ranks run or if no supervisor was left to write one;
    ``trainer_restarts``: verdicts on trainers that were started again within it."""

    attempt: Attempt
    verdict: Verdict | None
    trainer_restarts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class RunStatus:
    """State of a run. ``state`` in a word or two; ``step`` of ``total_steps`` in ``phase``; ``slurm``: its job, None if
    Slurm does not know it; ``rollout_jobs``: those that Slurm knows; ``checkpoints``, ``exports``: their steps;
    ``restarts``: attempts after the first; ``sides``: trainers and engines of a separate placement in the newest step;
    ``engine_losses``: engines that may be lost alone, in the newest attempt; ``alerts``: the newest ones, oldest first;
    ``unreadable``: the error on reading the run folder, if any; ``asked``: false if Slurm could not be asked."""

    run: RunEntry
    state: str
    slurm: JobStatus | None
    rollout_jobs: tuple[JobStatus, ...] = ()
    phase: str | None = None
    step: int | None = None
    total_steps: int | None = None
    reward: float | None = None
    tokens_per_second: float | None = None
    checkpoints: tuple[int, ...] = ()
    best_checkpoint: Best | None = None
    exports: tuple[int, ...] = ()
    restarts: int = 0
    sides: SidesStatus | None = None
    engine_losses: EnginesRecord | None = None
    alerts: tuple[Alert, ...] = ()
    attempts: tuple[AttemptStatus, ...] = ()
    unreadable: str = ""
    asked: bool = True

    @property
    def verdict(self) -> Verdict | None:
        """The last verdict so far."""
        return next((one.verdict for one in reversed(self.attempts) if one.verdict), None)


def run_status(
    run: RunEntry, job: JobStatus | None, *, asked: bool = True, rollout_jobs: Sequence[JobStatus] = ()
) -> RunStatus:
    """State of a run. ``job``: its job in Slurm, if known; ``asked``: false if Slurm could not be asked;
    ``rollout_jobs``: likewise."""
    known = RunStatus(run, job.words if job is not None else "unreadable", job, tuple(rollout_jobs), asked=asked)
    try:
        made, records = tuple(_attempts(run)), MetricsFile(run.folder.metrics).tail(RECENT_STEPS)
        newest = run.folder.attempt(made[-1].attempt.number) if made else None
        last = records[-1] if records else {}
        return replace(
            known,
            state=_state(run, job, made, asked=asked),
            attempts=made,
            restarts=max(0, len(made) - 1),
            phase=last.get("phase"),
            step=last.get("step"),
            total_steps=last.get("total_steps"),
            reward=last_number(records, "reward/mean"),
            tokens_per_second=last_number(records, "perf/tokens_per_second"),
            checkpoints=attempts.saved_steps(run.folder),
            best_checkpoint=attempts.saved_best(run.folder),
            alerts=tuple(read_alerts(run.folder)[-_ALERTS:]),
            sides=read_sides(newest) if newest is not None else None,
            engine_losses=read_engines(newest) if newest is not None else None,
            exports=attempts.exported_steps(run.folder),
        )
    except OSError as error:
        return replace(known, unreadable=f"the run folder cannot be read: {error}")


def statuses(runs: Sequence[RunEntry]) -> list[RunStatus]:
    """State of each run, with one query of Slurm for all jobs of a cluster."""
    jobs = read_jobs_of(runs)
    return [run_status(run, jobs.get(job_key(run)), rollout_jobs=rollout_jobs_of(run, jobs)) for run in runs]


def job_key(run: RunEntry) -> tuple[str, str]:
    """Cluster and id of the run's job, both empty without one."""
    return (run.job.cluster, run.job.job_id) if run.job else ("", "")


def rollout_jobs_of(run: RunEntry, jobs: Mapping[tuple[str, str], JobStatus]) -> list[JobStatus]:
    """The run's rollout jobs among those that Slurm knows, in their order."""
    if run.job is None or not run.job.rollout_job:
        return []
    number, cluster = run.job.rollout_job, run.job.cluster
    found = [job for key, job in jobs.items() if key[0] == cluster and key[1].partition("_")[0] == number]
    return sorted(found, key=lambda job: (len(job.job_id), job.job_id))


def read_jobs_of(runs: Iterable[RunEntry]) -> dict[tuple[str, str], JobStatus]:
    """Jobs of runs that Slurm still knows, with rollout jobs, by ``job_key``. Raises UserError if Slurm does not
    answer."""
    ids: dict[str, list[str]] = {}
    for run in runs:
        for job_id in (run.job.job_id, run.job.rollout_job) if run.job is not None else ():
            if job_id:
                ids.setdefault(job_key(run)[0], []).append(job_id)
    return {
        (cluster, job_id): job for cluster, names in ids.items() for job_id, job in read_jobs(names, cluster).items()
    }


def queue_words(job: JobStatus, now: float | None = None) -> str:
    """Reason and expected start of a queued job; place, start and time left of a running one."""
    now = time.time() if now is None else now
    if not job.live:
        return job.words + (f" at {clock(job.end, now)}" if job.end else "")
    if not job.queued:
        verb = ", started at" if job.state == "SUSPENDED" else " since"
        since = f"{verb} {clock(job.start, now)}" if job.start else ""
        left = f", {duration(job.time_left)} left" if job.time_left is not None else ""
        place = f" on {job.nodes}" if job.nodes else ""
        return f"{job.words}{since}{place}{left}"
    words = f"{job.why.words} ({job.reason.partition(',')[0]})" if job.reason else job.why.words
    if job.why.key and job.why.kind != "waits":
        words += f"; {job.why.key}: {job.why.remedy}"
    elif job.why.remedy:
        words += f"; {job.why.remedy}"
    return words + (f", expected to start at {clock(job.start, now)}" if job.start else "")


def verdict_words(verdict: Verdict) -> str:
    """Cause and action, in one line."""
    place = f" (rank {verdict.rank}" + (f" on {verdict.node})" if verdict.node else ")") if verdict.rank >= 0 else ""
    place = place or (f" ({verdict.node})" if verdict.node else "")
    message = f": {verdict.message}" if verdict.message and verdict.cause != "finished" else ""
    return f"{CAUSE_WORDS.get(verdict.cause, verdict.cause)}{place}{message}{_action_words(verdict)}"


def _action_words(verdict: Verdict) -> str:
    changed = f" with {', '.join(verdict.overrides)}" if verdict.overrides else ""
    changed += f" without {', '.join(verdict.excluded)}" if verdict.excluded else ""
    match verdict.action:
        case "retry":
            wait = f" after {duration(verdict.wait_seconds)}" if verdict.wait_seconds else ""
            return f" -> retried{wait}{changed}"
        case "requeue":
            return f" -> requeued{changed}"
        case "stop":
            return " -> stopped"
    return ""


def as_json(status: RunStatus) -> dict[str, Any]:
    """Fields by name, times as Unix times."""
    run, record, found = status.run, status.run.job, asdict(status)
    for internal in ("run", "unreadable", "asked"):
        del found[internal]
    jobs = [{**asdict(job), "words": queue_words(job)} for job in (status.slurm, *status.rollout_jobs) if job]
    return {
        "name": run.name,
        "folder": str(run.folder.path),
        "job_id": record.job_id if record else None,
        "submitted": record.submitted if record else None,
        **found,
        "slurm": jobs.pop(0) if status.slurm else None,
        "rollout_jobs": jobs,
        "exports": [{"step": step, "folder": str(attempts.export_folder(run.folder, step))} for step in status.exports],
        "attempts": [{**one.pop("attempt"), **one} for one in found["attempts"]],
    }


def _attempts(run: RunEntry) -> Iterator[AttemptStatus]:
    for folder in attempts.folders(run.folder):
        if (attempt := attempts.read_attempt(folder)) is not None:
            yield AttemptStatus(attempt, attempts.read_verdict(folder), tuple(attempts.restarts(folder)))


def _state(run: RunEntry, job: JobStatus | None, known: Sequence[AttemptStatus], *, asked: bool) -> str:
    """State by Slurm while the job is live; afterwards by the run's own verdict, which is more precise.

    A run on this machine runs while its launcher has its lock, which ends with the launcher.
    """
    # A verdict on an attempt before this submission does not count.
    current = bool(known) and (run.job is None or known[-1].attempt.started > run.job.submitted - _CLOCKS_SECONDS)
    last = known[-1].verdict if current else None
    if run.job is None and is_locked(run.folder):
        return "running"
    if job is not None and job.live:
        waits = job.state == "RUNNING" and last is not None and last.action == "retry"
        return "retrying" if waits else job.words
    if last is not None and last.cause == "finished":
        return "finished"
    if last is not None and last.cause == "stopped":
        return "stopped"
    if last is not None and last.action == "stop":
        return "failed"
    if job is not None:
        return job.words
    if run.job is None:
        return "killed" if known else "never started"
    return "gone" if asked else "unknown"

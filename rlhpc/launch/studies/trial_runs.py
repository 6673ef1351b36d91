"""Trials as runs: submitted to Slurm or run here, and what has become of them by their folders and the queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.run_lock import is_locked
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.runs.run_registry import RunEntry, read_run
from rlhpc.launch.runs.submit import make_plan, submit
from rlhpc.launch.slurm.commands import ask
from rlhpc.launch.slurm.queue import JobStatus, read_jobs
from rlhpc.launch.studies.planned import check_fits
from rlhpc.launch.supervise.local import INTERRUPTED
from rlhpc.plan.checks.run import check_config

ENTRY = "rlhpc.launch.studies.trial_job:run_trial"
_HOUR = 3600.0

Phase = Literal["new", "queued", "running", "finished", "failed"]


@dataclass(frozen=True)
class TrialState:
    """``cause`` and ``message`` of a failed run: by its last verdict, or ``ended`` without one."""

    phase: Phase
    cause: str = ""
    message: str = ""


class Trials(Protocol):
    """How trials are run. ``resumed``: causes of an end by the user, after which a trial goes on."""

    resumed: ClassVar[tuple[str, ...]]

    def check(self, config: RunConfig) -> None:
        """Raises UserError if a configuration cannot work."""

    def start(self, config: RunConfig, *, again: bool) -> None:
        """Starts a trial, or ``again`` from its last checkpoint."""

    def states(self, runs: Sequence[RunFolder]) -> list[TrialState]:
        """Of each run, in order. Raises UserError if Slurm does not answer."""

    def cancel(self, run: RunFolder) -> None:
        """Ends a trial without a last checkpoint."""


@dataclass(frozen=True)
class SlurmTrials:
    """Each trial is a job, whose batch step advances the study at its end. ``workdir``: that of their commands."""

    workdir: Path
    resumed: ClassVar[tuple[str, ...]] = ()

    def check(self, config: RunConfig) -> None:
        make_plan([config], self.workdir)
        check_fits(config)

    def start(self, config: RunConfig, *, again: bool) -> None:
        submit(make_plan([config], self.workdir), again=again, over=again, entry=ENTRY)

    def states(self, runs: Sequence[RunFolder]) -> list[TrialState]:
        entries = [read_run(run.path) for run in runs]
        ids = [entry.job.job_id for entry in entries if entry.job is not None]
        clusters = {entry.job.cluster for entry in entries if entry.job is not None}
        known = {job: status for cluster in clusters for job, status in read_jobs(ids, cluster or None).items()}
        return [state_of(entry, known.get(entry.job.job_id) if entry.job else None) for entry in entries]

    def cancel(self, run: RunFolder) -> None:
        job = read_run(run.path).job
        if job is not None:
            ask("scancel", job.job_id, *([job.rollout_job] if job.rollout_job else []), cluster=job.cluster)


@dataclass(frozen=True)
class LocalTrials:
    """Each trial runs in this process, to its end."""

    resumed: ClassVar[tuple[str, ...]] = ("stopped",)

    def check(self, config: RunConfig) -> None:
        check_config(config, prepared=config.prepare is None)
        check_fits(config)

    def start(self, config: RunConfig, *, again: bool) -> None:
        """Raises KeyboardInterrupt if the run was stopped: so is the study."""
        if run_here(config, resume=again) == INTERRUPTED:
            raise KeyboardInterrupt

    def states(self, runs: Sequence[RunFolder]) -> list[TrialState]:
        return [state_of(RunEntry(run, None), None) for run in runs]

    def cancel(self, run: RunFolder) -> None:
        """It has ended: nothing runs beside this process."""


def state_of(entry: RunEntry, job: JobStatus | None) -> TrialState:
    """``job``: what Slurm knows of the run's job. A run whose last attempt will have no other has ended, although its
    job may last a moment longer."""
    run = entry.folder
    folders = attempts.folders(run)
    if not folders and entry.job is None:
        return TrialState("new")
    verdict = attempts.read_verdict(folders[-1]) if folders else None
    if verdict is not None and entry.job is not None and verdict.time < entry.job.submitted:
        verdict = None  # of an attempt before the run was submitted again
    if verdict is not None and verdict.cause == "finished":
        return TrialState("finished")
    if verdict is not None and verdict.action == "stop":
        return TrialState("failed", verdict.cause, verdict.message)
    if job is not None and job.live:
        return TrialState("queued" if job.queued else "running")
    if entry.job is None and is_locked(run):
        return TrialState("running")
    if verdict is not None:
        return TrialState("failed", verdict.cause, verdict.message)
    return TrialState("failed", "ended", f"its job is {job.words}" if job is not None else "nothing of it is left")


def rank_hours(run: RunFolder, *, running: bool) -> float:
    """Hours of all ranks in all attempts. One that nobody was left to judge lasted until the next began, or until the
    run last recorded a step; the last one of a run that is ``running`` lasts until now."""
    known = [(attempts.read_attempt(folder), attempts.read_verdict(folder)) for folder in attempts.folders(run)]
    end, total = time.time() if running else _last_record(run), 0.0
    for attempt, verdict in reversed(known):
        if attempt is not None:
            last = verdict.time if verdict is not None else end
            total += attempt.world_size * max(0.0, last - attempt.started)
            end = attempt.started
    return total / _HOUR


def _last_record(run: RunFolder) -> float:
    try:
        return run.metrics.stat().st_mtime
    except OSError:
        return 0.0

"""Trials as runs, submitted to Slurm or run here: their states by folder and queue, and their plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rlhpc.config.schema import RunConfig, with_job_ranks
from rlhpc.core import attempts
from rlhpc.core.errors import DoesNotFitError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.run_lock import is_locked
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.runs.run_registry import RunEntry, read_run
from rlhpc.launch.runs.submit import make_plan, submit
from rlhpc.launch.slurm.commands import ask
from rlhpc.launch.slurm.queue import JobStatus, read_jobs
from rlhpc.launch.supervise.local import INTERRUPTED
from rlhpc.plan.checks.run import check_config
from rlhpc.plan.scenario import Scenario, make_scenario

ENTRY = "rlhpc.launch.studies.trial_job:run_trial"
_HOUR = 3600.0

Phase = Literal["new", "queued", "running", "finished", "failed"]


@dataclass(frozen=True)
class TrialState:
    """State of a trial's run. ``cause`` and ``message`` of a failed one: by its last verdict, or ``ended`` without
    one."""

    phase: Phase
    cause: str = ""
    message: str = ""


@dataclass(frozen=True)
class SlurmTrials:
    """Trials as jobs, whose batch step advances the study at its end. ``workdir``: that of their commands;
    ``resumed``: causes of an end by the user, after which a trial goes on."""

    workdir: Path
    resumed: ClassVar[tuple[str, ...]] = ()

    def check(self, config: RunConfig) -> None:
        """Raises UserError if a configuration cannot work."""
        make_plan([config], self.workdir)
        check_fits(config)

    def start(self, config: RunConfig, *, again: bool) -> None:
        """Starts a trial, or ``again`` from its last checkpoint."""
        submit(make_plan([config], self.workdir), again=again, over=again, entry=ENTRY)

    def states(self, runs: Sequence[RunFolder]) -> list[TrialState]:
        """States of the runs, in their order. Raises UserError if Slurm does not answer."""
        entries = [read_run(run.path) for run in runs]
        ids = [entry.job.job_id for entry in entries if entry.job is not None]
        clusters = {entry.job.cluster for entry in entries if entry.job is not None}
        known = {job: status for cluster in clusters for job, status in read_jobs(ids, cluster or None).items()}
        return [state_of(entry, known.get(entry.job.job_id) if entry.job else None) for entry in entries]

    def cancel(self, run: RunFolder) -> None:
        """Ends a trial without a last checkpoint."""
        job = read_run(run.path).job
        if job is not None:
            ask("scancel", job.job_id, *([job.rollout_job] if job.rollout_job else []), cluster=job.cluster)


@dataclass(frozen=True)
class LocalTrials:
    """Trials that run in this process, to their end."""

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
        """Does nothing: the trial has ended, nothing runs beside this process."""


Trials = SlurmTrials | LocalTrials


def state_of(entry: RunEntry, job: JobStatus | None) -> TrialState:
    """State of a trial. ``job``: the run's job in Slurm. A run without a further attempt has ended, although its job
    may last a little longer."""
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
    """Hours of all ranks in all attempts. An attempt without a verdict lasts until the next begins, or until the run
    last recorded a step; the last one of a run that is ``running`` lasts until now."""
    known = [(attempts.read_attempt(folder), attempts.read_verdict(folder)) for folder in attempts.folders(run)]
    end, total = time.time() if running else _last_record(run), 0.0
    for attempt, verdict in reversed(known):
        if attempt is not None:
            last = verdict.time if verdict is not None else end
            total += attempt.world_size * max(0.0, last - attempt.started)
            end = attempt.started
    return total / _HOUR


def _last_record(run: RunFolder) -> float:
    with contextlib.suppress(OSError):
        return run.metrics.stat().st_mtime
    return 0.0


def check_fits(config: RunConfig) -> None:
    """Raises DoesNotFitError if a run does not fit into the memory of its GPUs, or nodes, by the plan."""
    case = _scenario(config)
    if case is None:
        return
    if lacks := case.lacks(case.memory()):
        raise DoesNotFitError(f"does not fit, by the plan: {lacks[0].text}", where=lacks[0].where or "memory")


def planned_hours(config: RunConfig) -> float | None:
    """Hours of all ranks of a run, by the plan."""
    case = _scenario(config)
    if case is None or not config.train.steps or not (step := case.step()).engine_fits:
        return None
    return case.run(step).seconds * case.config.world_size / _HOUR


def _scenario(config: RunConfig) -> Scenario | None:
    if not config.model.path.exists():  # a function of the run prepares it
        return None
    return make_scenario(with_job_ranks(config) or config)

"""State of runs' jobs while a command follows them: from run folders, and from Slurm as seldom as possible."""

from __future__ import annotations

import contextlib
import sys
import time

from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.core.shown import show
from rlhpc.launch.run_lock import is_locked
from rlhpc.launch.runs.run_registry import JobRecord, RunEntry, all_runs, local_runs
from rlhpc.launch.runs.status import RunStatus, job_key, read_jobs_of, rollout_jobs_of, run_status
from rlhpc.launch.slurm.pace import ControllerPace
from rlhpc.launch.slurm.queue import JobStatus, read_job, read_jobs

_FOLDER_SECONDS = 2.0  # between two looks at the run folder


class FollowedJob:
    """``job``: as Slurm last reported it, None before that and if Slurm does not know it. ``known``: the job has just
    been submitted, so that the first question can wait.

    Jobs continue without a controller: while none answers, a run is not over. A run of this machine has no job, and is
    over when its launcher is.
    """

    def __init__(self, run: RunEntry, *, known: bool = False) -> None:
        self._run, self._pace = run, ControllerPace(known=known)
        self._looked, self._reported = float("-inf"), ""
        self.job: JobStatus | None = None
        self.rollout_jobs: list[JobStatus] = []
        self.is_over = False
        self.answers = 0  # of Slurm

    def look(self) -> bool:
        """Looks whether there is news, if it is time to; whether Slurm has answered."""
        if self.is_over or time.monotonic() - self._looked < _FOLDER_SECONDS:
            return False
        self._looked = time.monotonic()
        if self._run.job is None:
            self.is_over = not is_locked(self._run.folder)
            return False
        return self._pace.is_due(_folder_state(self._run)) and self._ask(self._run.job)

    def status(self) -> RunStatus:
        """State of the run, with its jobs as Slurm last reported them."""
        return run_status(self._run, self.job, asked=self.answers > 0, rollout_jobs=self.rollout_jobs)

    def _ask(self, job: JobRecord) -> bool:
        try:
            self.job, error = read_job(job.job_id, job.cluster), ""
            self.rollout_jobs = [*read_jobs([job.rollout_job], job.cluster).values()] if job.rollout_job else []
        except UserError as raised:
            error = str(raised)
        if error and error != self._reported:
            show(f"rlhpc: {error}", file=sys.stderr)
        self._reported = error
        self._pace.answered(error or (self.job and (self.job.state, self.job.reason)))
        if error:
            return False
        self.is_over, self.answers = self.job is None or not self.job.live, self.answers + 1
        return True


class FollowedJobs:
    """State of all runs: from their folders each time, from Slurm seldom. A job that Slurm has not been asked about is
    unknown until then."""

    def __init__(self) -> None:
        self._pace = ControllerPace()
        self._asked: set[tuple[str, str]] = {("", "")}
        self._jobs: dict[tuple[str, str], JobStatus] = {}
        self._reported = ""

    def statuses(self) -> list[RunStatus]:
        """State of each run in the list of runs."""
        runs = [*all_runs(), *local_runs()]
        keys = {job_key(run) for run in runs}
        if keys != {("", "")} and self._pace.is_due(keys):
            self._ask(runs, keys)
        return [
            run_status(
                run,
                self._jobs.get(key),
                asked=key in self._asked,
                rollout_jobs=rollout_jobs_of(run, self._jobs),
            )
            for run in runs
            for key in [job_key(run)]
        ]

    def _ask(self, runs: list[RunEntry], keys: set[tuple[str, str]]) -> None:
        try:
            self._jobs, error = read_jobs_of(runs), ""
            self._asked |= keys
        except UserError as raised:
            error = str(raised)
        if error and error != self._reported:
            show(f"rlhpc: {error}", file=sys.stderr)
        self._reported = error
        self._pace.answered(error or {key: job.state for key, job in self._jobs.items()})


def _folder_state(run: RunEntry) -> object:
    """What changes in the run folder when the job does."""
    count, verdict = 0, None
    with contextlib.suppress(OSError):  # no verdict yet, or a network file system refuses a file for a moment
        folders = attempts.folders(run.folder)
        count = len(folders)
        verdict = folders[-1].verdict.stat().st_mtime_ns if folders else None
    return count, verdict

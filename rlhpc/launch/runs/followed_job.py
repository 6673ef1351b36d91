"""State of runs' jobs while a command follows them: from run folders, and from Slurm as seldom as possible."""

from __future__ import annotations

import contextlib
import sys
import time

from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.core.shown import show
from rlhpc.launch.run_lock import is_locked
from rlhpc.launch.runs.run_registry import RunEntry, all_runs, local_runs
from rlhpc.launch.runs.status import RunStatus, run_status
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
        return self._pace.is_due(_folder_state(self._run)) and self._ask(self._run.job.job_id)

    def _ask(self, job_id: str) -> bool:
        try:
            self.job, error = read_job(job_id), ""
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
        self._asked: set[str] = set()
        self._jobs: dict[str, JobStatus] = {}
        self._reported = ""

    def statuses(self) -> list[RunStatus]:
        """State of each run in the list of runs."""
        runs = [*all_runs(), *local_runs()]
        ids = {run.job.job_id for run in runs if run.job and run.job.job_id}
        if ids and self._pace.is_due(ids):
            self._ask(ids)
        return [self._status(run) for run in runs]

    def _ask(self, ids: set[str]) -> None:
        try:
            self._jobs, error = read_jobs(ids), ""
            self._asked = ids
        except UserError as raised:
            error = str(raised)
        if error and error != self._reported:
            show(f"rlhpc: {error}", file=sys.stderr)
        self._reported = error
        self._pace.answered(error or {job_id: job.state for job_id, job in self._jobs.items()})

    def _status(self, run: RunEntry) -> RunStatus:
        job_id = run.job.job_id if run.job else ""
        return run_status(run, self._jobs.get(job_id), asked=not job_id or job_id in self._asked)


def _folder_state(run: RunEntry) -> object:
    """What changes in the run folder when the job does."""
    count, verdict = 0, None
    with contextlib.suppress(OSError):  # no verdict yet, or a network file system refuses a file for a moment
        folders = attempts.folders(run.folder)
        count = len(folders)
        verdict = folders[-1].verdict.stat().st_mtime_ns if folders else None
    return count, verdict

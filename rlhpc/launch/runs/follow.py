"""Follows runs: their place in the queue, then their progress and the phases of their ranks, until they end.

Run folders are read often, Slurm's controller is asked seldom: it serves every user of the cluster.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

from rlhpc.core import attempts
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.records import MetricsFile, Record
from rlhpc.core.shown import ShownOnly, read_report, show
from rlhpc.launch.run_lock import is_locked
from rlhpc.launch.runs.rank_phases import ranks_line
from rlhpc.launch.runs.run_registry import JobRecord, RunEntry
from rlhpc.launch.runs.status import RECENT_STEPS, RunStatus, queue_words, run_status, verdict_words
from rlhpc.launch.slurm.queue import JobStatus, read_job
from rlhpc.observe.progress import Display, RunOutput

INTERRUPTED = 130
# The run folder is read often, the controller is asked rarely: many users may be watching.
_METRICS_SECONDS, _QUEUED_SECONDS = 0.2, 1.0
_LATE_SECONDS = 10.0  # for the last files of a job to become visible on this machine
_FOLDER_SECONDS, _RANKS_SECONDS = 2.0, 3.0  # between two looks at the run folder, and at the phases of ranks
SHORTEST_SECONDS, LONGEST_SECONDS = 15.0, 60.0  # between two questions: after a change, and without any
SETTLE_SECONDS = 3.0  # from a change of the run folder to a question: the job's state changes soon after


def follow(run: RunEntry, *, submitted: bool = False) -> int:
    """Shows the run until it is over and returns its exit code. Ctrl-C ends the display, not the run. ``submitted``:
    just now, so that its folder has no progress of this job."""
    try:
        status = _watch(run, submitted=submitted)
    except KeyboardInterrupt:
        remedy = (
            f"cancel it with `rlhpc cancel {run.job.job_id}`" if run.job else "end it with Ctrl-C where it was started"
        )
        show(f"\nrlhpc: {_name(run)} keeps running; {remedy}")
        return INTERRUPTED
    return _show_end(status)


def _watch(run: RunEntry, *, submitted: bool) -> RunStatus:
    output, guard = RunOutput(run.folder), ShownOnly("the list of attempts")
    past = [] if submitted else MetricsFile(run.folder.metrics).tail(RECENT_STEPS)
    shown, attempts, status = "", 0, None
    followed = FollowedJob(run, known=submitted)
    while True:
        followed.look()
        job = followed.job
        if followed.is_over:
            _show_rest(output, past)
            return _final(run, job)
        with guard:  # a network file system may refuse a file for a moment
            status = run_status(run, job)
        known = status.attempts if status is not None else ()
        for one in known[max(0, attempts - 1) :]:
            words = f"attempt {one.attempt.number}: {verdict_words(one.verdict)}" if one.verdict else ""
            if words and words != shown:
                show(words)
                shown = words
        attempts = len(known)
        if run.job is None or (job is not None and not job.queued):
            _show_progress(run, output, past, followed)
            past = []
            continue
        words = f"queued: {queue_words(job)}" if job is not None else shown
        if words != shown:
            show(words)
        shown = words
        time.sleep(_QUEUED_SECONDS)


def _show_progress(run: RunEntry, output: RunOutput, past: Sequence[Record], followed: FollowedJob) -> None:
    """Shows metrics, ranks and alerts until the run or, by Slurm, its job no longer runs."""
    looked, ranks = float("-inf"), ""
    with Display(past=past) as display:
        while True:
            if time.monotonic() - looked >= _RANKS_SECONDS:
                looked, ranks = time.monotonic(), ranks_line(run)
            new, alerts = output.read()
            display.update(new, alerts=alerts, ranks=ranks)
            time.sleep(_METRICS_SECONDS)
            answered = followed.look()
            if followed.is_over or (answered and (followed.job is None or followed.job.queued)):
                return


def _show_rest(output: RunOutput, past: Sequence[Record]) -> None:
    """Shows the output of a run from before it was seen to run, or at its end."""
    new, alerts = output.read()
    if new or alerts or past:
        with Display(past=past) as display:
            display.update(new, alerts=alerts)


def _final(run: RunEntry, job: JobStatus | None) -> RunStatus:
    """Status with the last verdict, which a network file system may show some seconds late."""
    deadline = time.monotonic() + _LATE_SECONDS
    while True:
        status = run_status(run, job)
        complete = not status.unreadable and (not status.attempts or status.attempts[-1].verdict is not None)
        if complete or time.monotonic() > deadline:
            return status
        time.sleep(_METRICS_SECONDS)


def _show_end(status: RunStatus) -> int:
    run, verdict = status.run, status.verdict
    if status.state == "finished":
        if report := read_report(run.folder):
            show(report)
        show(f"rlhpc: finished: {run.folder.path}")
        return 0
    words = verdict_words(verdict) if verdict and status.state in ("failed", "stopped") else status.state
    show(f"rlhpc: {_name(run)} is over: {words}", file=sys.stderr)
    show(f"rlhpc: more: rlhpc logs {run.job.job_id if run.job else run.folder.path}", file=sys.stderr)
    if status.state == "stopped":
        return 0
    return EXIT_USER_ERROR if verdict is not None and verdict.cause in ("user", "data") else 1


def _name(run: RunEntry) -> str:
    return f"job {run.job.job_id}" if run.job else run.name


class FollowedJob:
    """State of a run and its job while a command follows it.

    ``job``: as Slurm last reported it, None before that and if Slurm does not know it. ``known``: the job has just been
    submitted, so that the first question can wait. Jobs continue without a controller: while none answers, a run is not
    over. A run of this machine has no job, and is over when its launcher is.
    """

    def __init__(self, run: RunEntry, *, known: bool = False) -> None:
        self._run, self._pace = run, ControllerPace(known=known)
        self._looked = float("-inf")
        self.job: JobStatus | None = None
        self.is_over = False

    def look(self) -> bool:
        """Looks at the folder and asks Slurm where either is due; true if Slurm has answered."""
        if self.is_over or time.monotonic() - self._looked < _FOLDER_SECONDS:
            return False
        self._looked = time.monotonic()
        if self._run.job is None:
            self.is_over = not is_locked(self._run.folder)
            return False
        return self._pace.is_due(_folder_state(self._run)) and self._ask(self._run.job)

    def _ask(self, job: JobRecord) -> bool:
        with self._pace.question() as noted:
            self.job = read_job(job.job_id, job.cluster)
            noted.append(self.job and (self.job.state, self.job.reason))
        if not noted:
            return False
        self.is_over = self.job is None or not self.job.live
        return True


def _folder_state(run: RunEntry) -> object:
    """Part of the run folder that changes when the job does."""
    count, verdict = 0, None
    with contextlib.suppress(OSError):  # no verdict yet, or a network file system refuses a file for a moment
        folders = attempts.folders(run.folder)
        count = len(folders)
        verdict = folders[-1].verdict.stat().st_mtime_ns if folders else None
    return count, verdict


class ControllerPace:
    """Pace of questions: never twice within 15 s, after 15, 30 and then 60 s while answers stay the same, and soon
    after the run folder has changed. The first question is due at once, or after 15 s if the job is ``known``."""

    def __init__(self, *, known: bool = False) -> None:
        self._pause, self._asked = SHORTEST_SECONDS, float("-inf")
        self._due = time.monotonic() + SHORTEST_SECONDS if known else float("-inf")
        self._answer: object = None
        self._reported = ""
        self._folder: object = None
        self._seen = False

    def is_due(self, folder: object = None) -> bool:
        """True if it is time to ask. ``folder``: state of the run folder."""
        now = time.monotonic()
        if self._seen and folder != self._folder:
            self._pause = SHORTEST_SECONDS
            self._due = min(self._due, max(now + SETTLE_SECONDS, self._asked + SHORTEST_SECONDS))
        self._folder, self._seen = folder, True
        return now >= self._due

    @contextlib.contextmanager
    def question(self) -> Iterator[list[object]]:
        """Context of a question, which appends its answer to the list. A new error is reported once."""
        answers: list[object] = []
        error = ""
        try:
            yield answers
        except UserError as raised:
            error = str(raised)
        if error and error != self._reported:
            show(f"rlhpc: {error}", file=sys.stderr)
        self._reported = error
        answer = error or answers[0]
        self._pause = min(2 * self._pause, LONGEST_SECONDS) if answer == self._answer else SHORTEST_SECONDS
        self._answer, self._asked = answer, time.monotonic()
        self._due = self._asked + self._pause

"""Shows a submitted run live: its place in the queue, then its progress, until it ends."""

from __future__ import annotations

import sys
import time

from rlhpc.core.errors import EXIT_USER_ERROR
from rlhpc.core.shown import ShownOnly, read_report, show
from rlhpc.launch.runs.followed_job import FollowedJob
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.status import RunStatus, queue_words, run_status, verdict_words
from rlhpc.launch.slurm.queue import JobStatus
from rlhpc.observe.progress import Display, MetricsFollower

INTERRUPTED = 130
# The run folder is read often, the controller is asked rarely (followed_job.py): many users may be watching.
_METRICS_SECONDS, _QUEUED_SECONDS = 0.2, 1.0
_LATE_SECONDS = 10.0  # for the last files of a job to become visible on this machine


def follow(run: RunEntry) -> int:
    """Shows the run until its job is over and returns its exit code. Ctrl-C ends the display, not the job."""
    assert run.job is not None, "it was submitted"
    try:
        status = _watch(run)
    except KeyboardInterrupt:
        show(f"\nrlhpc: job {run.job.job_id} keeps running; cancel it with `rlhpc cancel {run.job.job_id}`")
        return INTERRUPTED
    return _show_end(status)


def _watch(run: RunEntry) -> RunStatus:
    follower, guard = MetricsFollower(run.folder.metrics), ShownOnly("the list of attempts")
    alerts = MetricsFollower(run.folder.alerts)
    shown, attempts, status = "", 0, None
    followed = FollowedJob(run, known=True)
    while True:
        followed.look()
        job = followed.job
        if followed.is_over:
            _show_rest(follower, alerts)
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
        if job is not None and not job.queued:
            _show_progress(follower, alerts, followed)
            continue
        words = f"queued: {queue_words(job)}" if job is not None else shown
        if words != shown:
            show(words)
        shown = words
        time.sleep(_QUEUED_SECONDS)


def _show_progress(follower: MetricsFollower, alerts: MetricsFollower, followed: FollowedJob) -> None:
    """Shows metrics and alerts until Slurm reports that the job no longer runs."""
    with Display() as display:
        while True:
            display.update(follower.read_new(), alerts=alerts.read_new())
            time.sleep(_METRICS_SECONDS)
            if followed.look() and (followed.job is None or not followed.job.live or followed.job.queued):
                return


def _show_rest(follower: MetricsFollower, alerts: MetricsFollower) -> None:
    """Shows what a job wrote before it was seen to run, or at its end."""
    new, warnings = follower.read_new(), alerts.read_new()
    if new or warnings:
        with Display() as display:
            display.update(new, alerts=warnings)


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
    assert run.job is not None
    if status.state == "finished":
        if report := read_report(run.folder):
            show(report)
        show(f"rlhpc: finished: {run.folder.path}")
        return 0
    words = verdict_words(verdict) if verdict and status.state in ("failed", "stopped") else status.state
    show(f"rlhpc: job {run.job.job_id} is over: {words}", file=sys.stderr)
    show(f"rlhpc: more: rlhpc logs {run.job.job_id}", file=sys.stderr)
    if status.state == "stopped":
        return 0
    return EXIT_USER_ERROR if verdict is not None and verdict.cause in ("user", "data") else 1

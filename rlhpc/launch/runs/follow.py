"""Shows a submitted run live: its place in the queue, then its progress, until it ends."""

from __future__ import annotations

import sys
import time

from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.shown import ShownOnly, read_report, show
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.status import RunStatus, queue_words, run_status, verdict_words
from rlhpc.launch.slurm.queue import JobStatus, read_job
from rlhpc.observe.progress import Display, MetricsFollower

INTERRUPTED = 130
# The run folder is read often, the controller is asked rarely: many users may be watching.
_METRICS_SECONDS, _QUEUE_SECONDS = 0.2, 2.0
_LATE_SECONDS = 10.0  # for the last files of a job to become visible on this machine


def follow(run: RunEntry) -> int:
    """Shows the run until its job is over and returns its exit code. Ctrl-C ends the display, not the job."""
    assert run.job is not None, "it was submitted"
    try:
        status = _watch(run, run.job.job_id)
    except KeyboardInterrupt:
        show(f"\nrlhpc: job {run.job.job_id} keeps running; cancel it with `rlhpc cancel {run.job.job_id}`")
        return INTERRUPTED
    return _show_end(status)


def _watch(run: RunEntry, job_id: str) -> RunStatus:
    follower, guard = MetricsFollower(run.folder.metrics), ShownOnly("the list of attempts")
    alerts = MetricsFollower(run.folder.alerts)
    shown, attempts, status = "", 0, None
    while True:
        job = _read(job_id)
        if job is None or not job.live:
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
        if job.queued:
            words = f"queued: {queue_words(job)}"
            if words != shown:
                show(words)
            shown = words
            time.sleep(_QUEUE_SECONDS)
        else:
            _show_progress(follower, alerts, job_id)


def _show_progress(follower: MetricsFollower, alerts: MetricsFollower, job_id: str) -> None:
    """Shows metrics and alerts until the job no longer runs."""
    asked = time.monotonic()
    with Display() as display:
        while True:
            display.update(follower.read_new(), alerts=alerts.read_new())
            time.sleep(_METRICS_SECONDS)
            if time.monotonic() - asked < _QUEUE_SECONDS:
                continue
            job, asked = _read(job_id), time.monotonic()
            if job is None or not job.live or job.queued:
                display.update(follower.read_new(), alerts=alerts.read_new())
                return


def _read(job_id: str) -> JobStatus | None:
    """State of the job, waiting for a controller that is unreachable: jobs continue without it."""
    while True:
        try:
            return read_job(job_id)
        except UserError as error:
            show(f"rlhpc: {error}", file=sys.stderr)
            time.sleep(5 * _QUEUE_SECONDS)


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

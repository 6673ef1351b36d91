"""How runs stand: what Slurm says of their jobs, and what their folders say, put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.core.records import is_step, parse_records
from rlhpc.core.storage import patiently
from rlhpc.launch.runs.run_registry import Run
from rlhpc.launch.slurm.queue import JobStatus
from rlhpc.launch.slurm.times import clock
from rlhpc.observe.progress import duration, last_number

_TAIL_BYTES = 65536  # of metrics.jsonl: many steps
_CLOCKS_SECONDS = 60.0  # by which clocks of login and compute nodes may differ
_CAUSES = {
    "finished": "finished",
    "user": "wrong input, or an error in the user's code",
    "data": "wrong data",
    "non_finite": "gradients or weights are not finite",
    "gpu_memory": "out of GPU memory",
    "host_memory": "out of host memory",
    "network": "the network, or a collective, failed",
    "bad_node": "a node is at fault",
    "hang": "no progress",
    "disk_full": "disk full",
    "storage": "the file system failed",
    "crash": "a rank crashed",
    "launch": "the ranks could not be started",
    "time_limit": "the job's time ended",
    "preempted": "preempted",
    "stopped": "stopped as asked",
    "requeued": "requeued",
}


@dataclass(frozen=True)
class Start:
    """One start of the ranks with its verdict, None while they run or when nobody was left to give one."""

    attempt: Attempt
    verdict: Verdict | None


@dataclass(frozen=True)
class RunStatus:
    """``state`` in one word or two; ``step`` of ``total`` in ``phase``; ``job`` None when Slurm does not know it;
    ``unreadable`` is the error with which the run folder could not be read, if any."""

    run: Run
    state: str
    job: JobStatus | None
    starts: tuple[Start, ...]
    phase: str = ""
    step: int | None = None
    total: int | None = None
    reward: float | None = None
    tokens_per_second: float | None = None
    unreadable: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The last one that was given."""
        return next((start.verdict for start in reversed(self.starts) if start.verdict), None)

    @property
    def restarts(self) -> int:
        """Starts of the ranks after the first."""
        return max(0, len(self.starts) - 1)


def run_status(run: Run, job: JobStatus | None, asked: bool = True) -> RunStatus:
    """``job``: what Slurm knows of the run's job, if anything; ``asked`` false: it could not be asked."""
    try:
        starts, records = tuple(_starts(run)), tail_records(run.folder.metrics)
    except OSError as error:
        state = job.words if job is not None else "unreadable"
        return RunStatus(run, state, job, (), unreadable=f"the run folder cannot be read: {error}")
    last = records[-1] if records else {}
    return RunStatus(
        run,
        _state(run, job, starts, asked),
        job,
        starts,
        last.get("phase", ""),
        last.get("step"),
        last.get("total_steps"),
        last_number(records, "reward/mean"),
        last_number(records, "perf/tokens_per_second"),
    )


def statuses(runs: Sequence[Run]) -> list[RunStatus]:
    """Of each run, Slurm being asked once for all of them."""
    from rlhpc.launch.slurm.queue import read_jobs

    ids = [run.job.job_id for run in runs if run.job and run.job.job_id]
    jobs = read_jobs(ids) if ids else {}
    return [run_status(run, jobs.get(run.job.job_id) if run.job else None) for run in runs]


def queue_words(job: JobStatus, now: float | None = None) -> str:
    """What a queued job waits for, and its expected start; of a job that runs, since when, where and for how long."""
    now = time.time() if now is None else now
    if not job.live:
        return job.words + (f" at {clock(job.end, now)}" if job.end else "")
    if not job.queued:
        since = f" since {clock(job.start, now)}" if job.start else ""
        left = f", {duration(job.time_left)} of its time left" if job.time_left is not None else ""
        place = f" on {job.nodes}" if job.nodes else ""
        return f"{job.words}{since}{place}{left}"
    words = f"{job.why.words} ({job.reason.partition(',')[0]})" if job.reason else job.why.words
    if job.why.key and job.why.kind != "waits":
        words += f"; {job.why.key}: {job.why.remedy}"
    elif job.why.remedy:
        words += f"; {job.why.remedy}"
    return words + (f", expected to start at {clock(job.start, now)}" if job.start else "")


def verdict_words(verdict: Verdict) -> str:
    """Cause and what was done about it, in one line."""
    place = f" (rank {verdict.rank}" + (f" on {verdict.node})" if verdict.node else ")") if verdict.rank >= 0 else ""
    place = place or (f" ({verdict.node})" if verdict.node else "")
    message = f": {verdict.message}" if verdict.message and verdict.cause != "finished" else ""
    return f"{_CAUSES.get(verdict.cause, verdict.cause)}{place}{message}{_action_words(verdict)}"


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
            return " -> not tried again"
    return ""


def as_json(status: RunStatus) -> dict[str, Any]:
    """For programs: every field by name, times as Unix times."""
    job, record = status.job, status.run.job
    return {
        "name": status.run.name,
        "folder": str(status.run.folder.path),
        "job_id": record.job_id if record else None,
        "submitted": record.submitted if record else None,
        "state": status.state,
        "slurm": {**asdict(job), "words": queue_words(job)} if job else None,
        "phase": status.phase or None,
        "step": status.step,
        "total_steps": status.total,
        "reward": status.reward,
        "tokens_per_second": status.tokens_per_second,
        "restarts": status.restarts,
        "starts": [
            {**asdict(start.attempt), "verdict": asdict(start.verdict) if start.verdict else None}
            for start in status.starts
        ],
    }


def tail_records(path: Path) -> list[dict[str, Any]]:
    """The last records of a file of JSON lines; a line being written is left out."""

    def read() -> bytes:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()

    try:
        data = patiently(read, path)
    except FileNotFoundError:
        return []
    return [record for record in parse_records(data) if is_step(record)]


def _starts(run: Run) -> list[Start]:
    found = []
    for folder in attempts.folders(run.folder):
        attempt = attempts.read_attempt(folder)
        if attempt is not None:
            found.append(Start(attempt, attempts.read_verdict(folder)))
    return found


def _state(run: Run, job: JobStatus | None, starts: Sequence[Start], asked: bool) -> str:
    """Of a job that Slurm still runs, Slurm's word; of one that is over, the run's own verdict says more."""
    # A verdict on a start before this submission says nothing of it.
    current = bool(starts) and (run.job is None or starts[-1].attempt.started > run.job.submitted - _CLOCKS_SECONDS)
    last = starts[-1].verdict if current else None
    if job is not None and job.live:
        waits = job.state == "RUNNING" and last is not None and last.action == "retry"
        return "retrying" if waits else job.words
    if last is not None and last.cause == "finished":
        return "finished"
    if last is not None and last.action == "stop":
        return "failed"
    if last is not None and last.cause == "stopped":
        return "stopped"
    if job is not None:
        return job.words
    if run.job is None:
        return "running or killed" if starts and last is None else "never started"
    return "gone" if asked else "unknown"

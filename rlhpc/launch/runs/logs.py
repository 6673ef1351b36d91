"""Logs of a run's ranks, first that of the rank that failed first."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rlhpc.core import attempts, exits
from rlhpc.core.errors import UserError
from rlhpc.core.files import names_in
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.records import newest_lines
from rlhpc.core.storage import exists, patiently
from rlhpc.launch.roles import attempt_roles
from rlhpc.launch.runs.run_registry import JobRecord, RunEntry
from rlhpc.launch.slurm.queue import read_job

_POLL_SECONDS = 0.2
RANK_LOG = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True)
class Log:
    """A log file and its title."""

    title: str
    path: Path


def log_files(
    run: RunEntry, attempt: int | None = None, rank: int | None = None, *, all_ranks: bool = False
) -> list[Log]:
    """Logs to show, first that of the rank that failed first, else of rank 0; the batch step's before any attempt.
    ``attempt``: its number; default: the last."""
    known = attempts.folders(run.folder)
    if attempt is None and not known:
        return [batch_log(run)]
    folder = _attempt(known, attempt)
    ranks = rank_logs(folder)
    if rank is not None:
        if rank not in ranks:
            remedy = f"use {min(ranks)} to {max(ranks)}" if ranks else "wait until the ranks have started"
            raise UserError(f"no log of it in attempt {folder.number}", where=f"rank {rank}", remedy=remedy)
        selected = [rank]
    elif not ranks:
        return [batch_log(run)]
    else:
        first = failed_rank(folder)
        first = first if first in ranks else min(ranks)
        selected = [first, *(other for other in ranks if all_ranks and other != first)]
    attempt_record = attempts.read_attempt(folder)
    roles = attempt_roles(folder, attempt_record.world_size) if attempt_record is not None else None

    def title(number: int) -> str:
        role = f" ({roles.label(number)})" if roles is not None and number < roles.world_size else ""
        return f"rank {number}{role}, attempt {folder.number}"

    return [Log(title(number), ranks[number]) for number in selected]


def rank_logs(folder: AttemptFolder) -> dict[int, Path]:
    """Log of each rank, by rank."""
    names = filter(None, map(RANK_LOG.fullmatch, names_in(folder.logs)))
    return dict(sorted((int(name[1]), folder.logs / name[0]) for name in names))


def batch_log(run: RunEntry) -> Log:
    """Log of the job's batch step: setup lines, supervisor, srun."""
    if run.job is None:
        raise UserError("no rank has printed anything", where=str(run.folder.path), remedy="see `rlhpc status`")
    path = Path(run.job.log)
    if not exists(path):
        remedy = f"see `rlhpc status {run.job.job_id}`"
        raise UserError(_why_absent(run, run.job), where=str(run.folder.path), remedy=remedy)
    return Log(f"job {run.job.job_id}", path)


def _why_absent(run: RunEntry, job: JobRecord) -> str:
    """Reason why a job has no log, by the attempts in the run folder and by Slurm's queue."""
    gone = f"the log of job {job.job_id} is not there: it was deleted, or Slurm could not write it: {job.log!r}"
    begun = [attempts.read_attempt(folder) for folder in attempts.folders(run.folder)]
    if any(attempt is not None and attempt.started >= job.submitted for attempt in begun):
        return gone
    try:
        status = read_job(job.job_id)
    except UserError:
        return f"job {job.job_id} has no log, and Slurm does not say whether it has begun"
    if status is None or not status.live:
        return gone
    return f"job {job.job_id} has printed nothing yet: it is {status.words}"


def failed_rank(folder: AttemptFolder) -> int | None:
    """Rank that caused the end of an attempt, by its verdict, else by the ranks' records."""
    verdict = attempts.read_verdict(folder)
    if verdict is not None and verdict.rank >= 0:
        return verdict.rank
    record = exits.first_failure(exits.read_exits(folder.exits).values())
    return record.rank if record is not None else None


def tail(path: Path, lines: int) -> tuple[str, int]:
    """Last lines of a file of any size, and the offset at which they end."""

    def read() -> tuple[bytes, int]:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            return b"\n".join([*islice(newest_lines(file, end), lines + 1)][::-1]), end

    data, end = patiently(read, path)
    return "".join(line + "\n" for line in data.decode(errors="replace").splitlines()[-lines:]), end


def follow_log(path: Path, begin: int, ended: Callable[[], bool]) -> Iterator[str]:
    """Text of the file from offset ``begin`` on, as it is appended, until ``ended`` and nothing is left."""

    def read() -> bytes:
        try:
            with open(path, "rb") as file:  # opened again each time: its handle may become stale
                file.seek(begin)
                return file.read()
        except FileNotFoundError:
            return b""

    while True:
        over = ended()  # asked before the last read
        if text := patiently(read, path):
            begin += len(text)
            yield text.decode(errors="replace")
        elif over:
            return
        else:
            time.sleep(_POLL_SECONDS)


def _attempt(known: list[AttemptFolder], number: int | None) -> AttemptFolder:
    if number is None:
        return known[-1]
    folder = next((one for one in known if one.number == number), None)
    if folder is None:
        remedy = f"use 1 to {known[-1].number}" if known else "wait for the first"
        raise UserError("no such attempt", where=f"--attempt {number}", remedy=remedy)
    return folder

"""What the ranks of a run printed, the culprit's first."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhpc.core import attempts, exits
from rlhpc.core.errors import UserError
from rlhpc.core.files import names_in
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.storage import exists, patiently
from rlhpc.launch.runs.run_registry import Run

_BLOCK = 1 << 16
_POLL_SECONDS = 0.2
_RANK_LOG = re.compile(r"rank-(\d+)\.log|\d+_(\d+)_log\.out")


@dataclass(frozen=True)
class Log:
    """One file, and what to call it."""

    title: str
    path: Path


def log_files(run: Run, attempt: int | None = None, rank: int | None = None, all_ranks: bool = False) -> list[Log]:
    """The logs to show, first the one that matters: of the rank that is to blame, else rank 0's. ``attempt`` is the
    number of a start, by default the last. Before any start it is what the batch step printed."""
    starts = attempts.folders(run.folder)
    if attempt is None and not starts:
        return [batch_log(run)]
    folder = _start(run, starts, attempt)
    ranks = rank_logs(folder)
    if rank is not None:
        if rank not in ranks:
            has = f"there are {min(ranks)} to {max(ranks)}" if ranks else "none has printed anything yet"
            raise UserError(f"start {folder.number} has no log of it", where=f"rank {rank}", remedy=has)
        chosen = [rank]
    elif not ranks:
        return [batch_log(run)]
    else:
        first = culprit_of(folder)
        first = first if first in ranks else min(ranks)
        chosen = [first, *(other for other in ranks if all_ranks and other != first)]
    return [Log(f"rank {number}, start {folder.number}", ranks[number]) for number in chosen]


def rank_logs(folder: AttemptFolder) -> dict[int, Path]:
    """What each rank printed, by rank: srun writes rank-00003.log, submitit on one machine 4711_3_log.out."""
    found = {}
    for file in names_in(folder.logs):
        if name := _RANK_LOG.fullmatch(file):
            found[int(name[1] or name[2])] = folder.logs / file
    return dict(sorted(found.items()))


def batch_log(run: Run) -> Log:
    """What the job's own step printed: the setup lines, the launcher, srun."""
    if run.job is None:
        raise UserError("no rank has printed anything", where=str(run.folder.path), remedy="see `rlhpc status`")
    path = Path(run.job.log)
    if not exists(path):
        raise UserError(
            f"job {run.job.job_id} has printed nothing yet",
            where=str(run.folder.path),
            remedy=f"see `rlhpc status {run.job.job_id}`",
        )
    return Log(f"job {run.job.job_id}", path)


def culprit_of(folder: AttemptFolder) -> int | None:
    """The rank to blame for the end of a start, by its verdict or else by the ranks' records."""
    verdict = attempts.read_verdict(folder)
    if verdict is not None and verdict.rank >= 0:
        return verdict.rank
    record = exits.culprit(exits.read_exits(folder.exits).values())
    return record.rank if record is not None else None


def tail(path: Path, lines: int) -> tuple[str, int]:
    """The last lines of a file of any size, and the byte at which they end: more may be written meanwhile."""

    def read() -> tuple[bytes, int]:
        with open(path, "rb") as file:
            end = position = file.seek(0, 2)
            data = b""
            while position > 0 and data.count(b"\n") <= lines:
                step = min(_BLOCK, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
        return data, end

    data, end = patiently(read, path)
    return "".join(line + "\n" for line in data.decode(errors="replace").splitlines()[-lines:]), end


def follow_log(path: Path, begin: int, ended: Callable[[], bool]) -> Iterator[str]:
    """What the file holds from the byte ``begin`` on, as it is appended, until ``ended`` and nothing is left."""

    def read() -> bytes:
        try:
            with open(path, "rb") as file:  # anew each time: its handle may go stale
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


def _start(run: Run, starts: list[AttemptFolder], number: int | None) -> AttemptFolder:
    if number is None:
        return starts[-1]
    folder = next((start for start in starts if start.number == number), None)
    if folder is None:
        known = f"there are 1 to {starts[-1].number}" if starts else "there is none yet"
        raise UserError("no such start of the ranks", where=f"--attempt {number}", remedy=known)
    return folder

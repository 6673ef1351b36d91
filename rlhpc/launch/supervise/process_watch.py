"""Watches and ends the ranks of one machine."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from submitit import Job

from rlhpc.core import storage
from rlhpc.core.exits import ExitRecord, StartRecord, read_exits, read_starts

# How much later than the first rank another may start before it counts as lost.
_START_SECONDS = 120.0
_END_SECONDS = 2.0
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')  # of faulthandler


class Ranks:
    """The processes of a submitit local job, seen through their start and exit records.

    submitit's controller starts one process per rank and waits for all of them; it neither notices nor ends the
    others when one dies, and it keeps exit codes to itself.
    """

    def __init__(self, job: Job, exits: Path, ranks: range, node: str) -> None:
        """``ranks``: the run's numbers of the job's tasks."""
        self._job, self._exits, self.ranks, self.node = job, exits, ranks, node
        self.gone = ""
        self._starts: dict[int, StartRecord] = {}
        self._silent: dict[int, ExitRecord] = {}

    def poll(self) -> dict[int, ExitRecord]:
        """Exit records of the ranks that ended; a rank that left none gets one of kind ``signal``."""
        if len(self._starts) < len(self.ranks):
            self._starts = self._read_starts()
        all_over = self._job.done()
        # Before the records are read: a rank writes its record, then ends.
        gone = {rank for rank, start in self._starts.items() if not start.process.is_alive()}
        exits = {rank: record for rank, record in read_exits(self._exits).items() if rank in self.ranks}
        for rank in self.ranks:
            if rank in gone or (rank not in self._starts and (all_over or self._is_late())):
                self._silent.setdefault(rank, self._silent_record(rank))
        return {**self._silent, **exits}

    def log(self, rank: int) -> Path:
        """Log of the rank."""
        return Path(self._job.task(rank - self.ranks.start).paths.stdout)

    def ask_to_stop(self) -> None:
        """Asks the ranks to finish their step, save and end."""
        for start in self._read_starts().values():
            if start.process.is_alive():
                os.kill(start.process.pid, signal.SIGUSR2)

    def wait_for_end(self, seconds: float) -> None:
        """Waits for ranks that are done to end by themselves."""
        deadline = time.monotonic() + seconds
        while not self._job.done() and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self) -> None:
        """Kills every rank with its children, then submitit's controller."""
        if len(self._starts) < len(self.ranks):
            with suppress(OSError):  # those known so far are killed anyway
                self._starts = self._read_starts(storage.BRIEF)
        for start in self._starts.values():
            start.process.kill_group()
        controller = int(self._job.job_id)
        for signum in (signal.SIGTERM, signal.SIGKILL):  # the controller passes SIGTERM on to ranks not yet started
            if self._job.done():
                return
            with suppress(ProcessLookupError):
                os.kill(controller, signum)
            deadline = time.monotonic() + _END_SECONDS
            while not self._job.done() and time.monotonic() < deadline:
                time.sleep(0.02)

    def _read_starts(self, patience: storage.Patience | None = None) -> dict[int, StartRecord]:
        starts = read_starts(self._exits, patience)
        return {rank: start for rank, start in starts.items() if rank in self.ranks}

    def _is_late(self) -> bool:
        first = min((start.time for start in self._starts.values()), default=time.time())
        return time.time() - first > _START_SECONDS

    def _silent_record(self, rank: int) -> ExitRecord:
        start = self._starts.get(rank)
        if start is None:
            return ExitRecord(rank, self.node, 0, time.time(), "signal", message="ended before it started")
        message = _fatal_error(self.log(rank)) or "was killed, or ended without a Python error"
        return ExitRecord(rank, start.node, start.process.pid, time.time(), "signal", message=message)


def _fatal_error(log: Path) -> str:
    """Fatal error that faulthandler wrote when the interpreter crashed, such as a segmentation fault, and where; or
    empty."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = text.splitlines()
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if not fatal:
        return ""
    error, *stacks = lines[fatal[-1] :]
    own = next((number for number, line in enumerate(stacks) if line.startswith("Current thread ")), len(stacks))
    frame = _FRAME.fullmatch(stacks[own + 1]) if own + 1 < len(stacks) else None
    where = f" in {frame['function']} ({frame['file']}, line {frame['line']})" if frame else ""
    return f"crashed: {error.removeprefix(_FATAL)}{where}"

"""Events of a run, each with its place on the curves: attempts, failures, requeues, checkpoints, alerts, notes."""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.core.files import names_in
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.records import number, read_records
from rlhpc.observe.page.numbers import Steps

KINDS = ("attempt", "end", "failure", "requeue", "checkpoint", "alert", "note")
MOST_ATTEMPTS, MOST_LINES = 200, 500  # the newest ones
_LONGEST = 2000  # characters
_RANK_LOG = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True)
class Mark:
    """An event. ``step`` of ``phase`` is the last one before it; ``logs``: titles and paths of files."""

    kind: str
    time: float
    phase: str
    step: int
    text: str
    logs: tuple[tuple[str, Path], ...] = ()


class Places:
    """Finds the step that was done at a time."""

    def __init__(self, steps: Steps) -> None:
        self._known = sorted(
            (time, phase, int(step))
            for phase, column in steps.times.items()
            for step, time in zip(column.steps, column.values, strict=True)
        )
        self._times = [time for time, _, _ in self._known]
        self._warm_up = steps.totals.get("sft", 0)

    def at(self, time: float) -> tuple[str, int]:
        """Phase and step at a time; before the first record its phase and step 0."""
        index = bisect_right(self._times, time)
        if index:
            return self._known[index - 1][1:]
        return (self._known[0][1] if self._known else "rl"), 0

    def of_total(self, step: int) -> tuple[str, int]:
        """Phase and step of a checkpoint, which counts the steps of both phases."""
        return ("sft", step) if step <= self._warm_up else ("rl", step - self._warm_up)


def read_marks(run: RunFolder, steps: Steps) -> list[Mark]:
    """All events of a run, the oldest first."""
    places = Places(steps)
    found = [*_attempts(run, places), *_checkpoints(run, places)]
    found += _lines(run.alerts, "alert", places)
    found += _lines(run.notes, "note", places)
    return sorted(found, key=lambda mark: mark.time)


def _attempts(run: RunFolder, places: Places) -> Iterator[Mark]:
    for folder in attempts.folders(run)[-MOST_ATTEMPTS:]:
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # not written by a launcher
            attempt = attempts.read_attempt(folder)
            if attempt is None:
                continue
            yield Mark("attempt", attempt.started, *places.at(attempt.started), _begin_text(attempt), _logs(folder))
            verdict = attempts.read_verdict(folder)
            if verdict is not None:
                at = places.at(verdict.time)
                yield Mark(_kind(verdict), verdict.time, *at, _end_text(attempt, verdict), _logs(folder, verdict.rank))


def _begin_text(attempt: Attempt) -> str:
    begin = f"from step {attempt.saved_step}" if attempt.saved_step >= 0 else "from the beginning"
    words = f"attempt {attempt.number}: {attempt.world_size} ranks on {', '.join(attempt.nodes)}, {begin}"
    if attempt.job_id:
        words += f", job {attempt.job_id}"
    changed = f", with {', '.join(attempt.overrides)}" if attempt.overrides else ""
    return words + changed + (f", without {', '.join(attempt.excluded)}" if attempt.excluded else "")


def _end_text(attempt: Attempt, verdict: Verdict) -> str:
    cause = verdict.cause.replace("_", " ")
    whose = f", rank {verdict.rank} on {verdict.node}" if verdict.rank >= 0 else ""
    action = f"; {verdict.action}" if verdict.action in ("retry", "requeue") else ""
    message = f": {verdict.message}" if verdict.message else ""
    return f"attempt {attempt.number}: {cause}{whose}{message}{action}"


def _kind(verdict: Verdict) -> str:
    if verdict.action == "requeue":
        return "requeue"
    return "end" if verdict.cause in ("finished", "stopped") else "failure"


def _logs(folder: AttemptFolder, rank: int = -1) -> tuple[tuple[str, Path], ...]:
    """Log of the rank, else of the first one, and the folder of all."""
    files = {int(name[1]): name[0] for name in map(_RANK_LOG.fullmatch, names_in(folder.logs)) if name}
    rank = rank if rank in files else min(files, default=-1)
    first = ((f"log of rank {rank}", folder.logs / files[rank]),) if files else ()
    return (*first, ("all logs", folder.logs)) if files else ()


def _checkpoints(run: RunFolder, places: Places) -> Iterator[Mark]:
    for name in names_in(run.checkpoints, "step-*"):
        path = run.checkpoints / name
        with contextlib.suppress(ValueError, OSError):
            step = int(name.removeprefix("step-"))
            yield Mark("checkpoint", os.stat(path).st_mtime, *places.of_total(step), f"checkpoint of step {step}")


def _lines(path: Path, kind: str, places: Places) -> Iterator[Mark]:
    """Marks of the lines of alerts.jsonl or notes.jsonl."""
    for line in read_records(path)[-MOST_LINES:]:
        time, step = number(line.get("time")), line.get("step")
        if time is None:
            continue
        known = isinstance(line.get("phase"), str) and type(step) is int and 0 <= step < 1 << 24
        at = (line["phase"], step) if known else places.at(time)
        words = [line.get(name) for name in ("severity", "rule", "message", "text", "action")]
        text = " | ".join(str(word) for word in words if word and word != "warn")
        yield Mark(kind, time, *at, text[:_LONGEST])


def pack_marks(marks: Sequence[Mark], base: Path) -> list[list[Any]]:
    """Marks for the page's scripts, with links to logs from the folder ``base``."""
    packed = []
    for mark in marks:
        logs = [[title, link(path, base)] for title, path in mark.logs]
        packed.append([KINDS.index(mark.kind), mark.time, mark.phase, mark.step, mark.text, logs])
    return packed


def link(path: Path, base: Path) -> str:
    """Relative link: always a path, never another scheme."""
    return "./" + quote(os.path.relpath(path, base), safe="/")

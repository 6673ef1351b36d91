"""The line that says how a run goes, from the metrics its trainer writes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rlhpc.core.records import is_step, number, parse_records
from rlhpc.core.shown import ShownOnly, show

Record = Mapping[str, Any]

# Metric, phases that show it, how it is shown; the last value counts.
_SHOWN = (
    ("loss", ("sft",), "loss {:.3f}"),
    ("reward/mean", ("rl",), "reward {:.3f}"),
    ("validation/reward_mean", ("sft", "rl"), "validation {:.1%}"),
    ("perf/tokens_per_second", ("sft", "rl"), "{:,.0f} tokens/s"),
)
_RECENT_STEPS = 20
PLAIN_SECONDS = 5.0


def progress_line(records: Sequence[Record]) -> str:
    """One line from the records so far: phase, step, metrics, time left of the phase."""
    if not records:
        return "starting"
    phase, step, total = (records[-1].get(name) for name in ("phase", "step", "total_steps"))
    parts = [f"{phase} step {step}" + (f"/{total}" if type(total) is int else "")]
    for name, phases, text in _SHOWN:
        value = last_number(records, name)
        if value is not None and phase in phases:
            parts.append(text.format(value))
    skipped = sum(record.get(name) or 0 for record in records for name in ("skipped_updates", "critic/skipped_updates"))
    if skipped:
        parts.append(f"{skipped:.0f} update(s) skipped")
    left = _seconds_left(records)
    if left is not None:
        parts.append(f"{duration(left)} left")
    return " | ".join(parts)


def last_number(records: Sequence[Record], name: str) -> float | None:
    """Newest value of a metric; None if no record has a number."""
    values = (number(record.get(name)) for record in reversed(records))
    return next((value for value in values if value is not None), None)


def duration(seconds: float) -> str:
    """42 s, 3 min 07 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _seconds_left(records: Sequence[Record]) -> float | None:
    """Of the phase: steps left times the recent time of a step, validations and saves included."""
    last = records[-1]
    recent = [record for record in records[-_RECENT_STEPS:] if record.get("phase") == last.get("phase")]
    step, total, seconds = number(last.get("step")), number(last.get("total_steps")), _seconds_per_step(recent)
    if step is None or total is None or seconds is None:
        return None
    left = seconds * (total - step)
    return left if math.isfinite(left) and left >= 0 else None


def _seconds_per_step(records: Sequence[Record]) -> float | None:
    """From the first record to the last, or what the last one says of itself."""
    steps, seconds = (_difference(records, name) for name in ("step", "time"))
    if steps is not None and seconds is not None and steps > 0:
        return seconds / steps
    return number(records[-1].get("perf/step_seconds"))


def _difference(records: Sequence[Record], name: str) -> float | None:
    first, last = number(records[0].get(name)), number(records[-1].get(name))
    return None if first is None or last is None else last - first


class MetricsFollower:
    """Reads what is appended to a file of JSON lines after its construction, each record once.

    A run that resumes replaces the file by one that lacks the steps to be taken again. By the next look that file may
    be longer than the former one was: it is recognized by its inode, and read from its start. Records that the former
    file had, by phase, step and time, are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._guard = path, ShownOnly(f"reading {path.name}")
        self._inode, self._offset = (0, 0), 0
        self._known: set[str] = set()
        self.read_new()

    def read_new(self) -> list[Record]:
        """Records of the lines completed since the last call; lines that are no JSON objects are left out."""
        found: list[Record] = []
        with self._guard:
            for record in parse_records(self._read()):
                key = repr([record.get(name) for name in ("phase", "step", "time")])
                if key not in self._known:
                    self._known.add(key)
                    found.append(record)
        return found

    def _read(self) -> bytes:
        """Complete lines that were not read before, of this file."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed below; opened anew, as other NFS clients see it
        except FileNotFoundError:
            return b""
        with file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            if inode != self._inode or status.st_size < self._offset:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete


class Display:
    """Shows the progress line: rewritten in place on a terminal, else a new line every few seconds.

    Validations stay on the terminal as lines of their own. A terminal that fails ends nothing.
    """

    def __init__(self, plain_seconds: float = PLAIN_SECONDS) -> None:
        self._records: list[Record] = []
        self._started = time.monotonic()
        self._plain_seconds, self._printed_at, self._printed = plain_seconds, float("-inf"), ""
        self._guard, self._live = ShownOnly("the progress line"), None
        with self._guard:
            console = _Console()
            if console.is_terminal:
                self._live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Display:
        with self._guard:
            if self._live:
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._stop_live()
        elif self._records:
            with self._guard:
                self._print(progress_line(self._records))

    def update(self, new: Sequence[Record]) -> None:
        """Take the records that came since the last call, possibly none, and show how things stand."""
        with self._guard:
            self._update(new)
        if self._guard.failed and self._live:  # its console would keep what it could not write, and try again
            self._stop_live()

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        with self._guard:
            if live:
                live.stop()

    def _update(self, new: Sequence[Record]) -> None:
        for record in filter(is_step, new):
            self._records.append(record)
            if self._live and number(record.get("validation/reward_mean")) is not None:
                self._live.console.print(progress_line(self._records), highlight=False)
        line = progress_line(self._records)
        if self._live:
            text = Text(f"{line} | {duration(time.monotonic() - self._started)}", no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)
        elif time.monotonic() - self._printed_at >= self._plain_seconds:
            self._print(line)

    def _print(self, line: str) -> None:
        if line != self._printed:
            show(line)
            self._printed, self._printed_at = line, time.monotonic()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process."""
        raise BrokenPipeError("nobody reads the output")

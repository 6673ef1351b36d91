"""The line that says how a run goes, from the metrics its trainer writes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

Record = Mapping[str, Any]

# Metric, phases that show it, how it is shown; the last value counts.
_SHOWN = (
    ("loss", ("sft",), "loss {:.3f}"),
    ("reward/mean", ("rl",), "reward {:.3f}"),
    ("validation/accuracy", ("sft", "rl"), "validation {:.1%}"),
    ("perf/tokens_per_second", ("sft", "rl"), "{:,.0f} tokens/s"),
)
_RECENT_STEPS = 20
PLAIN_SECONDS = 5.0


def progress_line(records: Sequence[Record]) -> str:
    """One line from the records so far: phase, step, metrics, time left of the phase."""
    if not records:
        return "starting"
    phase, step, total = (records[-1].get(name) for name in ("phase", "step", "total_steps"))
    parts = [f"{phase} step {step}/{total}"]
    for name, phases, text in _SHOWN:
        value = next((record[name] for record in reversed(records) if record.get(name) is not None), None)
        if value is not None and phase in phases:
            parts.append(text.format(value))
    left = _seconds_left(records)
    if left is not None:
        parts.append(f"{duration(left)} left")
    return " | ".join(parts)


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
    try:
        steps, seconds = last["step"] - recent[0]["step"], last["time"] - recent[0]["time"]
        per_step = seconds / steps if steps > 0 else last.get("perf/step_seconds")
        return None if per_step is None else per_step * (last["total_steps"] - last["step"])
    except KeyError:
        return None


class MetricsFollower:
    """Reads what was appended to a file of JSON lines since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read_new(self) -> list[Record]:
        """Records of the lines completed since; a file that became shorter is read from its start."""
        try:
            if self._path.stat().st_size < self._offset:
                self._offset = 0
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]


class Display:
    """Shows the progress line: rewritten in place on a terminal, else a new line every few seconds.

    Validations stay on the terminal as lines of their own.
    """

    def __init__(self, plain_seconds: float = PLAIN_SECONDS) -> None:
        self._records: list[Record] = []
        self._started = time.monotonic()
        self._plain_seconds, self._printed_at, self._printed = plain_seconds, float("-inf"), ""
        console = Console()
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        elif self._records:
            self._print(progress_line(self._records))

    def update(self, new: Sequence[Record]) -> None:
        """Take the records that came since the last call, possibly none, and show how things stand."""
        for record in new:
            self._records.append(record)
            if self._live and record.get("validation/accuracy") is not None:
                self._live.console.print(progress_line(self._records), highlight=False)
        line = progress_line(self._records)
        if self._live:
            text = Text(f"{line} | {duration(time.monotonic() - self._started)}", no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)
        elif time.monotonic() - self._printed_at >= self._plain_seconds:
            self._print(line)

    def _print(self, line: str) -> None:
        if line != self._printed:
            print(line)
            sys.stdout.flush()
            self._printed, self._printed_at = line, time.monotonic()

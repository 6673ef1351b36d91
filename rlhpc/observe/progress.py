"""Progress line of a run, from the metrics that its trainer writes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.live import Live
from rich.text import Text

from rlhpc.core.folder import RunFolder
from rlhpc.core.records import LineFollower, MetricsFile, Record, add_step, is_step, number
from rlhpc.core.redaction import redact
from rlhpc.core.shown import ShownOnly, show
from rlhpc.core.terminal import Terminal
from rlhpc.core.text import duration
from rlhpc.observe.alerts.builtin import JOB_EVENTS

# Metric, phases that show it, format; the newest value is shown.
_SHOWN = (
    ("loss", ("sft",), "loss {:.3f}"),
    ("reward/mean", ("rl",), "reward {:.3f}"),
    ("kl", ("rl",), "KL {:.3g}"),
    ("response/length_mean", ("rl",), "length {:,.0f}"),
    ("advantage/zero_fraction", ("rl",), "{:.0%} zero advantages"),
    ("validation/reward_mean", ("sft", "rl"), "validation {:.1%}"),
    ("perf/tokens_per_second", ("sft", "rl"), "{:,.0f} tokens/s"),
)
_RECENT_STEPS = 20
PLAIN_SECONDS = 5.0


def progress_line(records: Sequence[Record]) -> str:
    """One line: phase, step, metrics and remaining time of the phase."""
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


def start_line(phase: str) -> str:
    """Activity of a run before its first step is done. ``phase``: of its ranks, empty if unknown."""
    return "starting" if phase in ("", "starting") else f"starting: {phase.replace('_', '-')}"


def last_number(records: Sequence[Record], name: str) -> float | None:
    """Newest value of a metric; None if no record has a number."""
    values = (number(record.get(name)) for record in reversed(records))
    return next((value for value in values if value is not None), None)


def _seconds_left(records: Sequence[Record]) -> float | None:
    """Remaining steps of the phase times the recent time per step, validations and saves included."""
    last = records[-1]
    recent = [record for record in records[-_RECENT_STEPS:] if record.get("phase") == last.get("phase")]
    step, total, seconds = number(last.get("step")), number(last.get("total_steps")), _seconds_per_step(recent)
    if step is None or total is None or seconds is None:
        return None
    left = seconds * (total - step)
    return left if math.isfinite(left) and left >= 0 else None


def _seconds_per_step(records: Sequence[Record]) -> float | None:
    """From the times of the first and last record, else the last record's own figure."""
    steps, seconds = (_difference(records, name) for name in ("step", "time"))
    if steps is not None and seconds is not None and steps > 0:
        return seconds / steps
    return number(records[-1].get("perf/step_seconds"))


def _difference(records: Sequence[Record], name: str) -> float | None:
    first, last = number(records[0].get(name)), number(records[-1].get(name))
    return None if first is None or last is None else last - first


class RunOutput:
    """Steps and alerts that a run adds from now on. A file that cannot be read is reported once."""

    def __init__(self, folder: RunFolder) -> None:
        self._steps, self._alerts = MetricsFile(folder.metrics).follow(), LineFollower(folder.alerts)
        self._guard = ShownOnly("reading metrics and alerts")
        self.read()

    def read(self) -> tuple[list[Record], list[Record]]:
        """Steps and alerts since the last call."""
        steps, alerts = list[Record](), list[Record]()
        with self._guard:
            alerts = self._alerts.read()
            steps, _ = self._steps.read()
        return steps, alerts


class Display:
    """Shows the progress line: updated in place on a terminal, else as a new line every few seconds.

    Until the first step is done, the line is the phase of the start and its seconds. Validations stay on the terminal
    as separate lines. A failing terminal does not end the run.
    """

    def __init__(self, plain_seconds: float = PLAIN_SECONDS, *, past: Sequence[Record] = ()) -> None:
        """``past``: records from before the display began."""
        self._records: list[Record] = [*past]
        self._started = time.monotonic()
        self._plain_seconds, self._printed_at, self._printed = plain_seconds, float("-inf"), ""
        self._guard, self._live = ShownOnly("the progress line"), None
        with self._guard:
            console = _Terminal()
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

    def update(self, new: Sequence[Record], phase: str = "", alerts: Sequence[Record] = (), ranks: str = "") -> None:
        """Adds the records and alerts since the last call, possibly none, and refreshes the line. ``phase``: of the
        ranks now; ``ranks``: a further line on them."""
        with self._guard:
            for alert in alerts:
                if alert.get("rule") in JOB_EVENTS:  # the launcher reports them itself
                    continue
                show(f"rlhpc: warning: {redact(str(alert.get('message', '')))}", file=sys.stderr)
            self._update(new, phase, ranks and f"\n{ranks}")
        if self._guard.failed and self._live:  # its console would buffer what it could not write, and retry
            self._stop_live()

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        with self._guard:
            if live:
                live.stop()

    def _update(self, new: Sequence[Record], phase: str, below: str) -> None:
        for record in filter(is_step, new):
            add_step(self._records, record)
            if self._live and number(record.get("validation/reward_mean")) is not None:
                self._live.console.print(progress_line(self._records))
        line = progress_line(self._records) if self._records else start_line(phase)
        timed = f"{line} | {duration(time.monotonic() - self._started)}"
        if self._live:
            self._live.update(Text(timed + below), refresh=True)
        elif time.monotonic() - self._printed_at >= self._plain_seconds:
            self._print(line if self._records else timed, below)

    def _print(self, line: str, below: str = "") -> None:
        if line != self._printed:
            show(line + below)
            self._printed, self._printed_at = line, time.monotonic()


class _Terminal(Terminal):
    def on_broken_pipe(self) -> None:
        """Raises, where rich would end the process."""
        raise BrokenPipeError("the reader of the output has closed it")

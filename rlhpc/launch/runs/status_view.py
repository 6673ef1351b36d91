"""Tables of ``rlhpc status``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rlhpc.core.attempts import export_folder
from rlhpc.core.terminal import Terminal
from rlhpc.core.text import duration, printable
from rlhpc.launch.runs.status import AttemptStatus, RunStatus, queue_words, verdict_words
from rlhpc.launch.slurm.commands import clock
from rlhpc.launch.supervise.engine_losses import EnginesRecord
from rlhpc.observe.alerts.record import Alert
from rlhpc.observe.engine_activity import SidesStatus

_PLAIN_COLUMNS = 200
_ENGINES = 8  # that are shown
_WIDE_COLUMNS = 120  # from here on a note has room beside the table
_COLOURS = {
    "running": "green",
    "finished": "green",
    "queued": "yellow",
    "retrying": "yellow",
    "failed": "red",
    "cancelled": "red",
    "killed": "red",
    "gone": "red",
}


def overview(statuses: Sequence[RunStatus]) -> RenderableType:
    """Table of all runs, with a note on those that wait or failed: in the last column, or below a narrow table."""
    return _Overview(statuses) if statuses else Text("no runs; start one with `rlhpc run` or `rlhpc submit`")


@dataclass(frozen=True)
class _Overview:
    statuses: Sequence[RunStatus]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE_COLUMNS
        yield _table(self.statuses, wide=wide)
        for status in () if wide else self.statuses:
            restarts = f"{status.restarts} restart(s)" if status.restarts else ""
            if words := "; ".join(filter(None, (restarts, _note(status)))):
                yield Text(f"{status.run.name}: {words}")


def _table(statuses: Sequence[RunStatus], *, wide: bool) -> Table:
    """Table of runs. ``wide``: with restarts and note; otherwise without these and without empty columns."""
    rows = [
        {
            "run": status.run.name,
            "job": status.run.job.job_id if status.run.job else "local",
            "state": status.state,
            "step": _steps(status),
            "reward": _number(status.reward, ".3f"),
            "tokens/s": _number(status.tokens_per_second, ",.0f"),
            "left": duration(status.slurm.time_left) if status.slurm and status.slurm.time_left is not None else "",
            **({"restarts": str(status.restarts or ""), "note": _note(status)} if wide else {}),
        }
        for status in statuses
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = [name for name in rows[0] if wide or any(row[name] for row in rows)]
    for name in names:
        if name in ("run", "job", "note") or (wide and name == "state"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for row in rows:
        colour = _COLOURS.get(row["state"], "")
        table.add_row(*(Text(row[name], style=colour if name == "state" else "") for name in names))
    return table


def details(status: RunStatus) -> RenderableType:
    """One run: job, progress, and each attempt with its verdict and the changes by recovery."""
    lines = Table.grid(padding=(0, 2))
    lines.add_row("run", f"{status.run.name}: {status.state}")
    lines.add_row("folder", str(status.run.folder.path))
    if status.run.job:
        unknown = "no longer known to Slurm" if status.asked else "Slurm does not answer"
        known = queue_words(status.slurm) if status.slurm else unknown
        lines.add_row("job", f"{status.run.job.job_id}: {known}")
    if status.slurm and status.slurm.restarts:
        times = {1: "once", 2: "twice"}.get(status.slurm.restarts, f"{status.slurm.restarts} times")
        lines.add_row("requeued", times)
    if status.rollout_jobs:
        rows = [f"{job.job_id}: {queue_words(job)}" for job in status.rollout_jobs]
        lines.add_row("rollout jobs", "\n".join(rows))
    if status.step is not None:
        parts = [f"{status.phase} step {_steps(status)}"]
        if status.reward is not None:
            parts.append(f"reward {status.reward:.3f}")
        if status.tokens_per_second is not None:
            parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
        lines.add_row("progress", " | ".join(parts))
    for name, text in sides_words(status.sides) if status.sides else ():
        lines.add_row(name, text)
    if status.engine_losses is not None and status.engine_losses.losses:
        lines.add_row("lost", losses_words(status.engine_losses))
    if status.checkpoints:
        best = status.best_checkpoint
        words = f"; best: {best.step} ({best.metric} {best.value:.4g})" if best else ""
        lines.add_row("checkpoints", f"steps {', '.join(map(str, status.checkpoints))}{words}")
    if status.exports:
        lines.add_row("exports", "\n".join(str(export_folder(status.run.folder, step)) for step in status.exports))
    last = status.attempts[-1] if status.attempts else None
    for name, values in (("changed", last.attempt.overrides), ("excluded", last.attempt.excluded)) if last else ():
        if values:
            lines.add_row(name, ", ".join(values))
    if status.unreadable:
        lines.add_row("note", status.unreadable)
    if status.alerts:
        lines.add_row("alerts", "\n".join(map(alert_words, status.alerts)))
    for one in status.attempts:
        lines.add_row(f"attempt {one.attempt.number}", _attempt_words(one))
    return lines


def sides_words(sides: SidesStatus) -> Iterator[tuple[str, str]]:
    """Rows on trainers and engines of a separate placement, with the slowest engines."""
    parts = [f"{sides.trainers_idle:.0%} idle"] if sides.trainers_idle is not None else []
    if sides.queued_groups is not None:
        parts.append(f"{sides.queued_groups} finished group(s) queued")
    if sides.staleness_max is not None:
        parts.append(f"staleness up to {sides.staleness_max}")
    if sides.sent_bytes is not None and sides.weights_bytes is not None:
        parts.append(f"weight sync: {sides.sent_bytes / 1e6:,.1f} MB of {sides.weights_bytes / 1e6:,.1f} MB")
    yield "trainers", " | ".join(parts)
    slowest = sorted(sides.engines, key=lambda row: row.tokens_per_second)[:_ENGINES]
    shown = [
        f"engine {row.engine} (rank {row.rank}): {row.tokens_per_second:,.0f} tokens/s, {row.idle:.0%} idle, "
        f"weights of step {row.version}"
        for row in sorted(slowest, key=lambda row: row.engine)
    ]
    left = len(sides.engines) - len(shown)
    yield "engines", "\n".join([*shown, *([f"and {left} faster ones"] if left else [])])


def losses_words(record: EnginesRecord) -> str:
    """Number of losses, and each engine that was lost last or is still absent."""
    now, known = time.time(), [f"{record.losses} loss(es) of engines in this attempt"]
    for number, engine in enumerate(record.engines):
        if not engine.why:
            continue
        state = {
            "running": f"started again at {clock(engine.since, now)}",
            "waiting": f"is started again at {clock(engine.due, now)}",
            "absent": "not started yet",
            "gone": f"not started again since {clock(engine.since, now)}",
        }[engine.phase]
        known.append(printable(f"engine {number}: {state} ({engine.why})"))
    return "\n".join(known)


def show(view: RenderableType) -> None:
    """Prints a table. Without a terminal, lines are not folded at 80 columns and do not end in blanks."""
    console = Terminal()
    if console.is_terminal:
        console.print(view)
        return
    console = Terminal(width=_PLAIN_COLUMNS)
    with console.capture() as captured:
        console.print(view)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def alert_words(alert: Alert) -> str:
    """Time, place, rule and message of an alert."""
    place = f"{alert.phase} step {alert.step}, " if alert.step >= 0 else ""
    done = f" -> {alert.action}" if alert.action != "warn" else ""
    return printable(f"{clock(alert.time, time.time())} {place}{alert.rule}: {alert.message}{done}")


def _attempt_words(one: AttemptStatus) -> str:
    """Time, place and origin of an attempt; in further lines restarts of its trainers, and its verdict."""
    attempt, verdict, now = one.attempt, one.verdict, time.time()
    origin = "the beginning" if attempt.saved_step < 0 else f"step {attempt.saved_step}"
    text = f"{clock(attempt.started, now)} {attempt.world_size} rank(s) on {', '.join(attempt.nodes)}, from {origin}"
    if one.trainer_restarts:
        last = one.trainer_restarts[-1]
        text += (
            f"\n{len(one.trainer_restarts)} restart(s) of the trainers, {clock(last.time, now)} {verdict_words(last)}"
        )
    return f"{text}\n{clock(verdict.time, now)} {verdict_words(verdict)}" if verdict else text


def _steps(status: RunStatus) -> str:
    return "" if status.step is None else f"{status.step}/{status.total_steps}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _note(status: RunStatus) -> str:
    """Reason why the job waits, else the last verdict."""
    if status.slurm is not None and status.slurm.queued:
        return queue_words(status.slurm)
    if status.unreadable:
        return status.unreadable
    verdict = status.verdict
    return "" if verdict is None or verdict.cause == "finished" else verdict_words(verdict)

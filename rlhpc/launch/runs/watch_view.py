"""Panels of `rlhpc watch`, for terminals from 80 × 24 characters on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhpc.core.text import duration, printable
from rlhpc.launch.runs.status import queue_words, verdict_words
from rlhpc.launch.runs.status_view import alert_words
from rlhpc.launch.runs.watch import METRICS, RankGroup, Snapshot, ranges

PLAIN_COLUMNS, PLAIN_LINES = 160, 60
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_NAME_COLUMNS, _VALUE_COLUMNS = 10, 9
_IDLE_SECONDS = 10.0  # shown from here on
_ALERTS = 5
_COLOURS = {"error": "red", "warning": "yellow", "info": ""}


def view(snapshot: Snapshot, console: Console, *, plain: bool = False) -> RenderableType:
    """All panels, no higher and wider than the console. ``plain``: with rules instead of boxes."""
    height = PLAIN_LINES if plain else console.size.height
    head = list(_head(snapshot, console.width))
    alerts = [_alert(snapshot, number) for number in range(len(snapshot.status.alerts))]
    # Three boxes have two lines each. Metrics come first, then ranks, then alerts; a line of each stays.
    room = height - len(head) - (3 if plain else 6)
    alerts = alerts[-max(1, min(_ALERTS, room // 5)) :]
    ranks = _ranks(snapshot)[: max(1, min(6, room // 4))]
    metrics = _metrics(snapshot, console, max(1, room - len(ranks) - max(1, len(alerts))))
    box: Callable[..., RenderableType] = _ruled if plain else _boxed
    shown = [
        box(metrics, "metrics"),
        box(_lines(ranks or [Text("no heartbeats")]), "ranks"),
        box(_lines(alerts or [Text("none")]), "alerts"),
    ]
    return Group(*head, *shown)


def sparkline(values: Sequence[float], columns: int, *, ascii_only: bool = False) -> str:
    """The values in ``columns`` characters: means of as many parts, between the least and the greatest. A part without
    a finite value is a blank."""
    marks = _ASCII if ascii_only else _BLOCKS
    parts = [_mean(values[begin:end]) for begin, end in _parts(len(values), columns)]
    known = [part for part in parts if part is not None]
    if not known:
        return ""
    least, span = min(known), max(known) - min(known)
    if not math.isfinite(span):
        return ""

    def mark(part: float | None) -> str:
        if part is None:
            return " "
        return marks[min(len(marks) - 1, int((part - least) / span * len(marks)))] if span > 0 else marks[0]

    return "".join(map(mark, parts))


def _parts(count: int, columns: int) -> Iterator[tuple[int, int]]:
    width = min(count, max(1, columns))
    for part in range(width):
        yield part * count // width, (part + 1) * count // width


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _head(snapshot: Snapshot, columns: int) -> Iterator[RenderableType]:
    status = snapshot.status
    state = Text.assemble((printable(status.run.name), "bold"), f": {status.state}")
    if status.job is not None:
        state.append(f" | job {status.job.job_id}: {queue_words(status.job)}")
    elif status.verdict is not None and status.state not in ("running", "finished"):
        state.append(f" | {printable(verdict_words(status.verdict))}")
    if status.restarts:
        state.append(f" | {status.restarts} restart(s)")
    yield _line(state)
    yield _line(Text(printable(snapshot.line)))
    if snapshot.done is not None:
        yield _bar(snapshot.done, columns)


def _bar(done: float, columns: int) -> Text:
    filled = round(done * columns)
    return Text.assemble(("=" * filled, "green"), ("-" * (columns - filled), "dim"))


def _metrics(snapshot: Snapshot, console: Console, lines: int) -> Table:
    """A line for each metric that the run has: name, newest value, sparkline."""
    columns = max(8, console.width - _NAME_COLUMNS - _VALUE_COLUMNS - 8)
    ascii_only = not console.encoding.lower().startswith("utf")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_NAME_COLUMNS, no_wrap=True)
    table.add_column(width=_VALUE_COLUMNS, justify="right", no_wrap=True)
    table.add_column(width=columns, no_wrap=True)
    found = 0
    for names, label, form in METRICS:
        values = next((snapshot.series[name] for name in names if snapshot.series.get(name)), None)
        if values is None or found == lines or (label == "loss" and "reward/mean" in snapshot.series):
            continue  # the loss of RL is about 0 even while the policy improves
        found += 1
        curve = sparkline(values, columns, ascii_only=ascii_only)
        table.add_row(label, Text(form.format(values[-1]), style="bold"), Text(curve, style="cyan"))
    if not found:
        table.add_row("no steps", "", "")
    return table


def _ranks(snapshot: Snapshot) -> list[Text]:
    """A line for each phase that ranks are in; the straggler first."""
    found = []
    if snapshot.straggler is not None:
        rank, ratio = snapshot.straggler.rank, snapshot.straggler.ratio
        found.append(_line(Text(f"rank {rank} takes {ratio:.2f} times as long per token as the others", "yellow")))
    found += [_line(_group(group)) for group in snapshot.groups]
    shown = sum(len(group.ranks) for group in snapshot.groups)
    if shown < snapshot.world_size and snapshot.groups:
        found.append(Text(f"of {snapshot.world_size} ranks, {shown} are shown", "dim"))
    return found


def _group(group: RankGroup) -> Text:
    step = "" if group.step is None else f", step {group.step}"
    who = f"rank{'s' if len(group.ranks) > 1 else ''} {ranges(group.ranks)}"
    who += f" ({group.role})" if group.role else ""
    if group.ended:
        return Text(f"ended{step}: {who}", "dim")
    idle = f" | {duration(group.idle)} without progress" if group.idle >= _IDLE_SECONDS else ""
    return Text(f"{printable(group.phase)}{step}: {who}{idle}")


def _alert(snapshot: Snapshot, number: int) -> Text:
    alert = snapshot.status.alerts[number]
    return _line(Text(alert_words(alert), _COLOURS.get(alert.severity, "")))


def _line(text: Text) -> Text:
    """The text in one line, cut to the width of where it is shown."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _lines(texts: Sequence[Text]) -> Group:
    return Group(*texts)


def _boxed(content: RenderableType, title: str) -> RenderableType:
    return Panel(content, title=title, title_align="left", padding=(0, 1))


def _ruled(content: RenderableType, title: str) -> RenderableType:
    return Group(Rule(title, align="left", characters="-", style=""), content)

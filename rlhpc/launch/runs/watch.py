"""`rlhpc watch`: state of a run from its folder, and its panels for terminals from 80 × 24 characters on.

The state is series of metrics, ranks with their phases, and alerts.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhpc.core import attempts
from rlhpc.core.heartbeat import Beat, beat_file, beats_file, read_beat, read_beats
from rlhpc.core.records import Record, is_step, number
from rlhpc.core.text import duration, printable
from rlhpc.launch.roles import attempt_roles
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.status import RunStatus, queue_words, verdict_words
from rlhpc.launch.runs.status_view import alert_words
from rlhpc.observe.progress import MetricsFollower, progress_line
from rlhpc.sharding.placement import Placement

_MOST_RANKS = 256  # whose files are read, if the launcher has written none for all
_BEATS_SECONDS = 3.0  # between two looks at them
_RECENT = 64  # records that the progress line is made of
# Metrics of a panel in their order: names (the run's first one is shown), label, format.
METRICS = (
    (("reward/mean",), "reward", "{:.3f}"),
    (("loss",), "loss", "{:.4g}"),
    (("validation/reward_mean",), "validation", "{:.1%}"),
    (("kl",), "KL", "{:.3g}"),
    (("entropy",), "entropy", "{:.3g}"),
    (("response/length_mean",), "length", "{:,.0f}"),
    (("perf/tokens_per_second",), "tokens/s", "{:,.0f}"),
    (("trainers/idle_fraction",), "idle train", "{:.0%}"),
    (("engines/idle_fraction_mean",), "idle eng.", "{:.0%}"),
    (("rollout/queued_groups",), "queued", "{:,.0f}"),
    (("memory/device_gib_max", "memory/cpu_gib_max"), "memory GiB", "{:.1f}"),
    (("grad_norm",), "grad norm", "{:.3g}"),
    (("advantage/zero_fraction",), "zero adv.", "{:.0%}"),
    (("response/truncated_fraction",), "truncated", "{:.0%}"),
    (("perf/step_seconds",), "s per step", "{:.2f}"),
)
_NAMES = [name for names, _, _ in METRICS for name in names]
PLAIN_COLUMNS, PLAIN_LINES = 160, 60
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_NAME_COLUMNS, _VALUE_COLUMNS = 10, 9
_IDLE_SECONDS = 10.0  # shown from here on
_ALERTS = 5
_COLOURS = {"error": "red", "warning": "yellow", "info": ""}


@dataclass(frozen=True)
class RankGroup:
    """Ranks in the same phase of the same step. ``idle``: the longest time since one of them reported progress;
    ``role``: such as ``trainers`` or ``engine 1``, empty without roles."""

    phase: str
    step: int | None
    ranks: tuple[int, ...]
    idle: float
    ended: bool
    role: str = ""


@dataclass(frozen=True)
class SlowRank:
    """The rank that the newest step names as slower than the others, and the factor."""

    rank: int
    ratio: float


@dataclass(frozen=True)
class Snapshot:
    """State of a run at a moment. ``series``: values of the present phase by metric; ``done``: share of its steps;
    ``groups``: the first ranks of ``world_size``."""

    status: RunStatus
    line: str
    done: float | None
    series: Mapping[str, Sequence[float]]
    groups: Sequence[RankGroup] = ()
    world_size: int = 0
    straggler: SlowRank | None = None


class Watched:
    """Follows a run."""

    def __init__(self, run: RunEntry) -> None:
        self._run = run
        self._follower = MetricsFollower(run.folder.metrics, past=True)
        self._phase, self._records = "", list[Record]()
        self._series: dict[str, dict[int, float]] = {}
        self._groups: tuple[Sequence[RankGroup], int] = ((), 0)
        self._looked = float("-inf")

    def snapshot(self, status: RunStatus) -> Snapshot:
        """The present state. ``status``: that of `rlhpc status`."""
        for record in filter(is_step, self._follower.read_new()):
            self._add(record)
        if time.monotonic() - self._looked >= _BEATS_SECONDS:
            self._groups, self._looked = rank_groups(self._run), time.monotonic()
        last = self._records[-1] if self._records else {}
        step, total = number(last.get("step")), number(last.get("total_steps"))
        done = min(1.0, step / total) if step is not None and total else None
        line = progress_line(self._records) if self._records else status.state
        series = {name: list(values.values()) for name, values in self._series.items()}
        return Snapshot(status, line, done, series, *self._groups, _straggler(last))

    def _add(self, record: Record) -> None:
        """Takes a record; a repeated step removes those after it."""
        phase, step = record["phase"], record["step"]
        if phase != self._phase:
            self._phase, self._series = phase, {}
        if self._records and step <= self._records[-1]["step"]:
            for values in self._series.values():
                for later in [one for one in values if one >= step]:
                    del values[later]
        self._records = [*self._records[1 - _RECENT :], record]
        for name in _NAMES:
            value = number(record.get(name))
            if value is not None:
                self._series.setdefault(name, {})[step] = value


def rank_groups(run: RunEntry) -> tuple[Sequence[RankGroup], int]:
    """Ranks of the newest attempt by phase and step, the smallest groups first, and the number of all ranks."""
    folders = attempts.folders(run.folder)
    attempt = attempts.read_attempt(folders[-1]) if folders else None
    if attempt is None:
        return (), 0
    now, roles = time.time(), attempt_roles(folders[-1], attempt.world_size)
    found = dict[tuple[str, int | None, bool, str], tuple[list[int], float]]()
    for beat, written in _beats(folders[-1].heartbeats, attempt.world_size):
        key = (beat.phase, beat.step, beat.ended, roles.role_of(beat.rank).name if roles else "")
        ranks, idle = found.setdefault(key, ([], 0.0))
        ranks.append(beat.rank)
        found[key] = ranks, max(idle, now - written + beat.idle)
    groups = [
        RankGroup(phase, step, tuple(ranks), idle, ended, _role(roles, ranks) if roles else "")
        for (phase, step, ended, _), (ranks, idle) in found.items()
    ]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks)), attempt.world_size


def _beats(folder: Path, world_size: int) -> list[tuple[Beat, float]]:
    """Records of the ranks in their order, and the time of each: written by the launcher for all ranks, or by
    themselves. A network file system may refuse a file for a moment."""
    with contextlib.suppress(OSError):
        beats, written = read_beats(folder), beats_file(folder).stat().st_mtime
        return [(beats[rank], written) for rank in sorted(beats)]
    found = []
    for rank in range(min(world_size, _MOST_RANKS)):
        try:
            if (beat := read_beat(folder, rank)) is not None:
                found.append((beat, beat_file(folder, rank).stat().st_mtime))
        except OSError:
            continue
    return found


def _role(roles: Placement, ranks: Sequence[int]) -> str:
    """The engine of all these ranks, else their role."""
    labels = {roles.label(rank) for rank in ranks}
    role = roles.role_of(ranks[0])
    return labels.pop() if len(labels) == 1 and role is roles.engines else role.name


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0-3, 7."""
    found: list[list[int]] = []
    for value in numbers:
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _straggler(record: Record) -> SlowRank | None:
    rank, ratio = number(record.get("perf/straggler_rank")), number(record.get("perf/straggler_ratio"))
    return SlowRank(int(rank), ratio) if rank is not None and ratio is not None and rank >= 0 else None


def view(snapshot: Snapshot, console: Console, *, plain: bool = False) -> RenderableType:
    """All panels, no higher and wider than the console. ``plain``: with rules instead of boxes."""
    height = PLAIN_LINES if plain else console.size.height
    head = list(_head(snapshot, console.width))
    alerts = [_line(Text(alert_words(one), _COLOURS.get(one.severity, ""))) for one in snapshot.status.alerts]
    # Three boxes have two lines each. Metrics come first, then ranks, then alerts; a line of each stays.
    room = height - len(head) - (3 if plain else 6)
    alerts = alerts[-max(1, min(_ALERTS, room // 5)) :]
    ranks = _ranks(snapshot)[: max(1, min(6, room // 4))]
    metrics = _metrics(snapshot, console, max(1, room - len(ranks) - max(1, len(alerts))))
    shown: list[tuple[str, RenderableType]] = [
        ("metrics", metrics),
        ("ranks", Group(*(ranks or [Text("no heartbeats")]))),
        ("alerts", Group(*(alerts or [Text("none")]))),
    ]
    if plain:
        return Group(*head, *(Group(Rule(name, align="left", characters="-", style=""), one) for name, one in shown))
    return Group(*head, *(Panel(one, title=name, title_align="left", padding=(0, 1)) for name, one in shown))


def sparkline(values: Sequence[float], columns: int, *, ascii_only: bool = False) -> str:
    """The values in ``columns`` characters: means of as many parts, between the least and the greatest. A part without
    a finite value is a blank."""
    marks = _ASCII if ascii_only else _BLOCKS
    count, width = len(values), min(len(values), max(1, columns))
    parts = [_mean(values[part * count // width : (part + 1) * count // width]) for part in range(width)]
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
        filled = round(snapshot.done * columns)
        yield Text.assemble(("=" * filled, "green"), ("-" * (columns - filled), "dim"))


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
    """A line for each phase of ranks; the straggler first."""
    found = []
    if snapshot.straggler is not None:
        rank, ratio = snapshot.straggler.rank, snapshot.straggler.ratio
        found.append(_line(Text(f"rank {rank} takes {ratio:.2f} times as long per token as the others", "yellow")))
    found += [_line(group_row(group)) for group in snapshot.groups]
    shown = sum(len(group.ranks) for group in snapshot.groups)
    if shown < snapshot.world_size and snapshot.groups:
        found.append(Text(f"of {snapshot.world_size} ranks, {shown} are shown", "dim"))
    return found


def group_row(group: RankGroup) -> Text:
    step = "" if group.step is None else f", step {group.step}"
    who = f"rank{'s' if len(group.ranks) > 1 else ''} {ranges(group.ranks)}"
    who += f" ({group.role})" if group.role else ""
    if group.ended:
        return Text(f"ended{step}: {who}", "dim")
    idle = f" | {duration(group.idle)} without progress" if group.idle >= _IDLE_SECONDS else ""
    return Text(f"{printable(group.phase)}{step}: {who}{idle}")


def _line(text: Text) -> Text:
    """The text in one line, cut to the width of its place."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text

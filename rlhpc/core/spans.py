"""Phases of this rank's present step: their times, waits for others, and tokens.

A process has one record, to which phases, collectives and workers on tokens add; ``take`` returns it. Timelines of the
newest steps, with the phases of all ranks, are in timeline.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.core.records import PHASES, MetricsFile, Position, Record, number
from rlhpc.core.storage import patiently


@dataclass(frozen=True)
class Span:
    """A phase from ``begin`` to ``end``, in seconds of ``time.perf_counter()``. ``wait``: seconds of it in which the
    rank waited for other ranks, reward workers or tools, transfers included."""

    phase: str
    begin: float
    end: float
    wait: float

    @property
    def busy(self) -> float:
        """Seconds without waits."""
        return max(0.0, self.end - self.begin - self.wait)


@dataclass
class StepSpans:
    """A step's phases in their order. By phase: ``tokens`` worked on, and ``rounds``, in which the engine generates a
    token of each of its responses; ``taken``: seconds without waits in which other processes had this rank's core.
    ``parts``: seconds of parts of phases, by name."""

    spans: list[Span] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    def busy(self, phase: str) -> float:
        """Seconds of a phase without waits, on a core of its own."""
        return sum(span.busy for span in self.spans if span.phase == phase) - self.taken.get(phase, 0.0)


@dataclass(frozen=True)
class CoreTimes:
    """Seconds in which the calling thread ran, and in which it was queued while others had its core."""

    running: float
    queued: float

    @classmethod
    def now(cls) -> CoreTimes:
        """Since the thread began, as Linux counts; queued for 0 seconds if it does not."""
        queued = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError), open(_SCHEDSTAT, "rb", buffering=0) as file:
            queued = int(file.read().split()[1]) / 1e9
        return cls(time.thread_time(), queued)

    def __sub__(self, other: CoreTimes) -> CoreTimes:
        return CoreTimes(self.running - other.running, self.queued - other.queued)


_SCHEDSTAT = "/proc/thread-self/schedstat"
_step = StepSpans()
_open: list[tuple[str, list[float]]] = []  # running phases, the innermost last, with their waits
_waiting = False  # in a part that counts as a wait as a whole


def counts_waits() -> bool:
    """True if a phase is running, outside of a part that is a wait already."""
    return bool(_open) and not _waiting


def enter(phase: str) -> None:
    """Begins a phase."""
    _open.append((phase, []))


def leave(begin: float, end: float, core: CoreTimes | None = None) -> None:
    """Ends the phase that was begun last. ``core``: times on its core, of a rank that computes there."""
    phase, waits = _open.pop()
    span = Span(phase, begin, end, min(sum(waits), end - begin))
    _step.spans.append(span)
    if core is not None:
        # The queue is also where a rank is at the end of a wait, so the rest may be less than the CPU time.
        busy = min(span.busy, max(core.running, span.busy - core.queued))
        _step.taken[phase] = _step.taken.get(phase, 0.0) + span.busy - busy


def forget() -> None:
    """Ends the phase that was begun last, without recording it."""
    _open.pop()


def waited(seconds: float) -> None:
    """Counts a wait of the running phase. Any thread may call it: autograd has threads of its own."""
    if _open:
        _open[-1][1].append(seconds)


def worked(tokens: int, rounds: int = 0) -> None:
    """Counts tokens that this rank has worked on in the running phase."""
    if _open:
        phase = _open[-1][0]
        _step.tokens[phase] = _step.tokens.get(phase, 0) + tokens
        _step.rounds[phase] = _step.rounds.get(phase, 0) + rounds


@contextlib.contextmanager
def part(name: str, *, waits: bool = False) -> Iterator[None]:
    """Measures a part of the running phase. ``waits``: it is a wait, such as one for reward workers."""
    global _waiting
    began, outer, _waiting = time.perf_counter(), _waiting, _waiting or waits
    try:
        yield
    finally:
        _waiting = outer
        if _open:
            seconds = time.perf_counter() - began
            _step.parts[name] = _step.parts.get(name, 0.0) + seconds
            if waits and not outer:
                waited(seconds)


def take() -> StepSpans:
    """The record since the last call."""
    global _step
    taken, _step = _step, StepSpans()
    return taken


@dataclass(frozen=True)
class StepTimeline:
    """A step of the phase ``sft`` or ``rl``, recorded at ``time``. ``ranks``: the spans of each rank, in seconds since
    the step began there."""

    phase: str
    step: int
    time: float
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def position(self) -> Position:
        """Orders the steps of a run."""
        return PHASES.index(self.phase), self.step

    def line(self) -> str:
        """Its line in the file, with a resolution of 0.1 ms."""
        spans = [[[s.phase, *(round(t, 4) for t in (s.begin, s.end, s.wait))] for s in rank] for rank in self.ranks]
        record = {"phase": self.phase, "step": self.step, "time": round(self.time, 3), "spans": spans}
        return json.dumps(record, separators=(",", ":")) + "\n"


def read_timelines(path: Path) -> list[StepTimeline]:
    """Timelines in the file, in the order of their steps; none if the file is absent."""
    return patiently(lambda: [*newest_timelines(path)][::-1], path)


def newest_timelines(path: Path) -> Iterator[StepTimeline]:
    """Yields the same, the newest first. Reads a line only when it is asked for: a line of 1,024 ranks is long."""
    return filter(None, map(_timeline, MetricsFile(path).newest()))


def _timeline(record: Record) -> StepTimeline | None:
    """None for a record that lacks parts or has others."""
    time = number(record.get("time"))
    try:
        ranks = tuple(tuple(_span(*entry) for entry in rank) for rank in record["spans"])
    except (KeyError, TypeError):
        return None
    return StepTimeline(record["phase"], record["step"], time, ranks) if time is not None else None


def _span(phase: str, *values: object) -> Span:
    times = [time for time in map(number, values) if time is not None]
    if not isinstance(phase, str) or len(times) != len(values):
        raise TypeError
    return Span(phase, *times)

"""Phases of this rank's present step: when each ran, how long it waited for others, and on how many tokens it worked.

A process has one record, which phases, collectives and whoever works on tokens add to; ``take`` returns it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


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
    """Whether a phase is running, outside of a part that is a wait already."""
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

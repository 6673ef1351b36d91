"""Phases of a step on all ranks: their times, waits and tokens as numbers that the ranks gather, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhpc.core.spans import Span, StepSpans
from rlhpc.observe.rank_numbers import Gathered

_MOST_SPANS = 64  # of a rank in a step
_SPAN, _LOAD = "span ", "load "  # hidden names begin so


@dataclass(frozen=True)
class Load:
    """What a rank did in a phase: seconds without waits, tokens that it worked on, and rounds of the engine."""

    busy: float
    tokens: float
    rounds: float

    @property
    def per_token(self) -> float:
        """Busy seconds per token; NaN without tokens."""
        return self.busy / self.tokens if self.tokens else math.nan

    def __add__(self, other: Load) -> Load:
        return Load(self.busy + other.busy, self.tokens + other.tokens, self.rounds + other.rounds)


def span_numbers(record: StepSpans, began: float) -> dict[str, float]:
    """Spans of a rank, in seconds since ``began``; the first 64."""
    found = {}
    for place, span in enumerate(record.spans[:_MOST_SPANS]):
        times = {"begin": span.begin - began, "end": span.end - began, "wait": span.wait}
        found |= {f"{_SPAN}{place:02} {span.phase} {name}": value for name, value in times.items()}
    return found


def spans_of(gathered: Gathered) -> tuple[tuple[Span, ...], ...]:
    """The spans of each rank."""
    columns: dict[str, list[list[float]]] = {}
    for name in gathered.names:  # in the order of place and phase: begin, end, wait
        if name.startswith(_SPAN):
            columns.setdefault(name.rpartition(" ")[0], []).append(gathered.column(name))
    ranks: list[tuple[Span, ...]] = []
    for rank in range(gathered.world_size):
        rows = [(key.split(" ", 2)[2], [column[rank] for column in found]) for key, found in columns.items()]
        ranks.append(tuple(Span(phase, *times) for phase, times in rows if not any(map(math.isnan, times))))
    return tuple(ranks)


def load_numbers(record: StepSpans) -> dict[str, float]:
    """Busy seconds, tokens and rounds of a rank in each phase."""
    found = {}
    for phase, tokens in record.tokens.items():
        rounds = float(record.rounds.get(phase, 0))
        values = {"busy": record.busy(phase), "rounds": rounds, "tokens": float(tokens)}
        found |= {f"{_LOAD}{phase} {name}": value for name, value in values.items()}
    return found


def loads_of(gathered: Gathered) -> dict[str, list[Load]]:
    """By phase: the load of each rank that has one, 0 of everything where it has none."""
    phases = {name.removeprefix(_LOAD).rpartition(" ")[0] for name in gathered.names if name.startswith(_LOAD)}
    found = {}
    for phase in sorted(phases):
        columns = [gathered.column(f"{_LOAD}{phase} {name}") for name in ("busy", "tokens", "rounds")]
        rows = [[0.0 if math.isnan(value) else value for value in row] for row in zip(*columns, strict=True)]
        found[phase] = [Load(*row) for row in rows]
    return {phase: loads for phase, loads in found.items() if any(load.tokens for load in loads)}


def wait_numbers(record: StepSpans) -> dict[str, float]:
    """Seconds that this rank waited in each phase, and seconds of parts of phases."""
    found: dict[str, float] = {}
    for span in record.spans:
        name = f"perf/{span.phase}_wait_seconds"
        found[name] = found.get(name, 0.0) + span.wait
    return found | {f"perf/{name}_seconds": seconds for name, seconds in record.parts.items()}


def work_numbers(record: StepSpans) -> dict[str, float]:
    """Tokens of each phase, and busy time for each."""
    found: dict[str, float] = {}
    for phase, tokens in record.tokens.items():
        found[f"perf/{phase}_tokens"] = float(tokens)
        if tokens:
            found[f"perf/{phase}_busy_us_per_token"] = 1e6 * record.busy(phase) / tokens
    return found

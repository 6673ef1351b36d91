"""Phases of a step on all ranks: their times, waits and tokens as numbers that the ranks gather, and back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlhpc.core.spans import Span, StepSpans
from rlhpc.observe.rank_numbers import Gathered

_MOST_SPANS = 64  # of a rank in a step
_SPAN, _LOAD = "span ", "load "  # hidden names begin so
BLOCKS = 5  # of steps, that are compared
RATIO = 1.2  # of a rank to the median of the others: its median over the blocks
BLOCK_RATIO = 1.1  # that it exceeds in each block
_FEW = 8  # ranks: among more, a rank's own value hardly moves the median


@dataclass(frozen=True)
class Load:
    """Work of a rank in a phase: seconds without waits, tokens that it worked on, and rounds of the engine."""

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


@dataclass(frozen=True)
class Straggler:
    """A rank that took ``ratio`` times as long per token as the median of the others, in ``phase``."""

    rank: int
    phase: str
    ratio: float


class Stragglers:
    """Compares ranks over the newest five blocks: a step each, or all steps of a fifth of ``seconds`` if they are
    shorter. ``stages``: the pipeline stage of each rank; engines have none."""

    def __init__(self, stages: Sequence[int], seconds: float) -> None:
        self._stages, self._block_seconds = stages, seconds / BLOCKS
        self._blocks: dict[str, deque[list[float]]] = {}
        self._loads: dict[str, list[Load]] = {}  # of the present block
        self._seconds = 0.0
        self._found: Straggler | None = None

    def add(self, loads: Mapping[str, Sequence[Load]], seconds: float) -> Straggler | None:
        """The slowest of the stragglers after a step of ``seconds`` with these loads by phase; None without one."""
        for phase, ranks in loads.items():
            former = self._loads.get(phase, [Load(0.0, 0.0, 0.0)] * len(ranks))
            self._loads[phase] = [one + other for one, other in zip(former, ranks, strict=True)]
        self._seconds += seconds
        if self._seconds >= self._block_seconds:
            for phase, ranks in self._loads.items():
                self._blocks.setdefault(phase, deque(maxlen=BLOCKS)).append(slowness(ranks, self._stages))
            for phase in self._blocks.keys() - self._loads.keys():  # the warm-up has ended
                del self._blocks[phase]
            self._loads, self._seconds = {}, 0.0
            found = [
                Straggler(rank, phase, ratio)
                for phase, blocks in self._blocks.items()
                for rank, ratio in enumerate(_ratios(blocks))
                if ratio > RATIO
            ]
            self._found = max(found, key=lambda straggler: straggler.ratio, default=None)
        return self._found


def slowness(ranks: Sequence[Load], stages: Sequence[int]) -> list[float]:
    """Busy time of each rank per token, over the median of the others of its stage; NaN without others. Of a phase
    with rounds the ratio per round, if that is smaller."""
    rounds = any(load.rounds for load in ranks)
    places = [0] * len(ranks) if rounds else list(stages)
    ratios = _relative([load.per_token for load in ranks], places)
    if rounds:
        per_round = _relative([load.busy / load.rounds if load.rounds else math.nan for load in ranks], places)
        ratios = [
            math.nan if math.isnan(a) or math.isnan(b) else min(a, b) for a, b in zip(ratios, per_round, strict=True)
        ]
    return ratios


def _relative(costs: Sequence[float], places: Sequence[int]) -> list[float]:
    known: dict[int, dict[int, float]] = {}
    for rank, (cost, place) in enumerate(zip(costs, places, strict=True)):
        if not math.isnan(cost):
            known.setdefault(place, {})[rank] = cost
    usual = {place: median(ranks.values()) for place, ranks in known.items()}
    found = []
    for rank, (cost, place) in enumerate(zip(costs, places, strict=True)):
        ranks = known.get(place, {})
        if len(ranks) <= _FEW:
            others = [other for one, other in ranks.items() if one != rank]
            base = median(others) if others else 0.0
        else:
            base = usual[place]
        found.append(cost / base if base > 0 else math.nan)
    return found


def _ratios(blocks: Sequence[Sequence[float]]) -> list[float]:
    """Median ratio of each rank over the blocks; 0 for one that is not slower in each of them."""
    found = []
    for values in zip(*blocks, strict=True):
        slow = all(value > BLOCK_RATIO for value in values)  # NaN is not
        known = [value for value in values if not math.isnan(value)]
        found.append(median(known) if slow and len(blocks) == BLOCKS else 0.0)
    return found

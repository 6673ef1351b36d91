"""Finds the rank that is slower than the others: by busy time per token, without waits, never by wall time.

Wall times say little: a collective ends on all ranks when the slowest has arrived. Ranks of one pipeline stage are
compared, because stages differ by design. Generating also takes time per round, in which each response gets a token:
an engine is slow only if its rounds are, too, because long responses leave it few tokens per round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlhpc.observe.phases import Load

BLOCKS = 5  # of steps, that are compared
RATIO = 1.2  # of a rank to the median of the others: its median over the blocks
BLOCK_RATIO = 1.1  # that it exceeds in each block
_FEW = 8  # ranks: among more, a rank's own value hardly moves the median


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

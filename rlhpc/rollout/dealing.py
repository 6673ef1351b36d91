"""Distribution and order of responses over engines while more responses wait than run.

Pure: every rank computes the same from the same reports. Nobody knows how long a response becomes: those that are
expected to be long start first, and none waits at one engine while another has room.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhpc.rollout.collect import Place
from rlhpc.rollout.requests import share_of
from rlhpc.rollout.schedule.response_order import ExpectedLengths, Unfinished, ordered


@dataclass(frozen=True)
class EngineReport:
    """An engine's unfinished responses, and the lengths of those that have ended since its last report."""

    unfinished: tuple[Unfinished, ...]
    ended: tuple[tuple[Place, int], ...]


@dataclass(frozen=True)
class Deal:
    """For each engine its responses in the order in which they run. ``waits``: some engine has more than can run."""

    engines: tuple[tuple[Place, ...], ...]
    waits: bool


@dataclass(frozen=True)
class Rules:
    """``slots``: responses that run on an engine at once. ``turn``: tokens after which a response lets others run that
    have had fewer turns; None: never. ``pinned``: a response that has begun stays on its engine."""

    slots: int
    turn: int | None = None
    pinned: bool = False


def deal(reports: Sequence[EngineReport], rules: Rules, expected: ExpectedLengths) -> Deal:
    """Deals unfinished responses to the engines: those that run next in equal numbers, then those that wait.

    Without turns what runs goes on where it is, and the longest of the others are next. With turns those with the
    fewest turns run, the longest of them first.
    """
    hands = _Hands(reports, rules)
    responses = [response for report in reports for response in report.unfinished]
    first_to_last = ordered(responses, expected, rules.turn)
    room = len(reports) * rules.slots
    hands.share(first_to_last[:room])
    hands.share(first_to_last[room:])
    rank = {response.place: number for number, response in enumerate(first_to_last)}
    engines = tuple(tuple(sorted(hand, key=lambda place: rank[place])) for hand in hands.of)
    return Deal(engines, any(len(hand) > rules.slots for hand in engines))


@dataclass
class _Hands:
    """The engines' responses while they are dealt."""

    reports: Sequence[EngineReport]
    rules: Rules
    of: list[list[Place]] = field(init=False)

    def __post_init__(self) -> None:
        self.of = [[] for _ in self.reports]
        self._held = {one.place: engine for engine, report in enumerate(self.reports) for one in report.unfinished}

    def share(self, responses: Sequence[Unfinished]) -> None:
        """Adds responses so that all engines have the same number, as far as those allow that stay where they are. One
        that need not move does not."""
        engines = len(self.of)
        total = sum(map(len, self.of)) + len(responses)
        left = [len(share_of(total, engines, engine)) - len(self.of[engine]) for engine in range(engines)]
        others = []
        for response in responses:
            engine = self._held[response.place]
            if self._stays(response) or left[engine] > 0:
                left[engine] -= 1
                self.of[engine].append(response.place)
            else:
                others.append(response.place)
        most = [(-number, engine) for engine, number in enumerate(left)]
        heapq.heapify(most)
        for place in others:
            number, engine = heapq.heappop(most)
            self.of[engine].append(place)
            heapq.heappush(most, (number + 1, engine))

    def _stays(self, response: Unfinished) -> bool:
        begun = response.tokens > 0 or response.running
        return begun and (self.rules.pinned or self.rules.turn is None)

"""Which engine generates which response, and in which order, while more responses wait than run.

Pure: every rank computes the same from the same reports. Nobody knows how long a response becomes: those that are
expected to be long start first, and none waits at one engine while another has room.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhpc.rollout.collect import Place
from rlhpc.rollout.requests import share_of

_LEAST = 16  # engine steps between two deals
_PRIOR = 2.0  # responses of the group that an expectation from an earlier step counts as


@dataclass(frozen=True)
class Unfinished:
    """A response on an engine that can be generated now, with the tokens that it has."""

    place: Place
    tokens: int
    running: bool  # it is one of those in the engine


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


def interval_of(mean: float) -> int:
    """Engine steps between two deals, for responses of this mean length in tokens."""
    return max(_LEAST, int(mean) // 4)


def turn_of(mean: float) -> int:
    """Tokens of a turn."""
    return 2 * interval_of(mean)


class ExpectedLengths:
    """Expected lengths of a step's responses by group, in the order that matters alone: from the same prompt's earlier
    responses, and from those of the group so far.

    ``earlier``: a prompt's lengths in former steps over the mean of all; ``mean``: that mean, in tokens.
    """

    def __init__(self, earlier: Callable[[int], float], mean: float) -> None:
        self._earlier, self._mean = earlier, mean
        self._ended: dict[int, list[int]] = defaultdict(list)

    def note(self, reports: Iterable[EngineReport]) -> None:
        """Counts responses that have ended."""
        for report in reports:
            for (group, _), length in report.ended:
                self._ended[group].append(length)

    def of(self, groups: Collection[int], begun: Mapping[int, Sequence[int]]) -> dict[int, float]:
        """Expected length by group. ``begun``: tokens of unfinished responses, which are expected to need the mean
        once more."""
        ended = [length for lengths in self._ended.values() for length in lengths]
        mean = sum(ended) / len(ended) if ended else self._mean
        found = {}
        for group in groups:
            seen = [*self._ended.get(group, ()), *(tokens + mean for tokens in begun.get(group, ()))]
            found[group] = (_PRIOR * self._earlier(group) * mean + sum(seen)) / (_PRIOR + len(seen))
        return found


def deal(reports: Sequence[EngineReport], rules: Rules, expected: ExpectedLengths) -> Deal:
    """Deals unfinished responses to the engines: those that run next in equal numbers, then those that wait.

    Without turns what runs goes on where it is, and the longest of the others are next. With turns those with the
    fewest turns run, the longest of them first.
    """
    hands = _Hands(reports, rules)
    responses = [response for report in reports for response in report.unfinished]
    begun: dict[int, list[int]] = defaultdict(list)
    for response in responses:
        if response.tokens:
            begun[response.place[0]].append(response.tokens)
    lengths = expected.of({response.place[0] for response in responses}, begun)

    def urgency(response: Unfinished) -> tuple[float, float, Place]:
        length = max(lengths[response.place[0]], response.tokens)
        if rules.turn is not None:
            return response.tokens // rules.turn - 0.5 * response.running, -length, response.place
        return -bool(response.tokens or response.running), -length, response.place

    ordered = sorted(responses, key=urgency)
    room = len(reports) * rules.slots
    hands.share(ordered[:room])
    hands.share(ordered[room:])
    rank = {response.place: number for number, response in enumerate(ordered)}
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

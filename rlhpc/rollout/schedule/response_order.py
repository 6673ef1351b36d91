"""In which order responses run while more wait than run. Pure: from token counts that all who decide it know alike.

Nobody knows how long a response becomes: those that are expected to be long start first, or responses take turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Place = tuple[int, int]  # group and index of a response
Dealing = Literal["equal", "longest_first", "turns"]

_LEAST = 16  # engine steps between two deals
_PRIOR = 2.0  # responses of the group that an expectation from an earlier step counts as


@dataclass(frozen=True)
class Unfinished:
    """A response on an engine that can be generated now, with the tokens that it has."""

    place: Place
    tokens: int
    running: bool  # it is one of those in the engine


def interval_of(mean: float) -> int:
    """Engine steps between two deals, for responses of this mean length in tokens."""
    return max(_LEAST, int(mean) // 4)


def turn_of(mean: float) -> int:
    """Tokens of a turn."""
    return 2 * interval_of(mean)


class ExpectedLengths:
    """Expected lengths of responses by group, in the order that matters alone: from the same prompt's earlier
    responses, and from those of the group so far.

    ``earlier``: a prompt's lengths in former steps over the mean of all; ``mean``: that mean, in tokens.
    """

    def __init__(self, earlier: Callable[[int], float], mean: float) -> None:
        self._earlier, self._mean = earlier, mean
        self._ended: dict[int, list[int]] = defaultdict(list)

    def note(self, ended: Iterable[tuple[int, int]]) -> None:
        """Counts responses that have ended: their groups and lengths."""
        for group, length in ended:
            self._ended[group].append(length)

    def renew(self, earlier: Callable[[int], float], mean: float) -> None:
        """Takes what is known of earlier steps now."""
        self._earlier, self._mean = earlier, mean

    def forget(self, gone: Callable[[int], bool]) -> None:
        """Forgets responses of groups that are gone."""
        for group in [group for group in self._ended if gone(group)]:
            del self._ended[group]

    def of(self, groups: Collection[int], begun: Mapping[int, Sequence[int]]) -> dict[int, float]:
        """Expected length by group. ``begun``: tokens of unfinished responses, which are expected to need the mean
        once more."""
        ended = [length for lengths in self._ended.values() for length in lengths]
        mean = sum(ended) / len(ended) if ended else self._mean
        found = {}
        for group in groups:
            seen, open_ = self._ended.get(group, ()), begun.get(group, ())
            total = sum(seen) + sum(open_) + len(open_) * mean  # the same in any order
            count = len(seen) + len(open_)
            found[group] = (_PRIOR * self._earlier(group) * mean + total) / (_PRIOR + count)
        return found


def ordered(
    responses: Sequence[Unfinished],
    expected: ExpectedLengths,
    turn: int | None,
    batch: Callable[[int], int] = lambda _: 0,
) -> list[Unfinished]:
    """The responses in the order in which they run. Without turns what runs goes on, and the longest of the others are
    next; with turns of ``turn`` tokens those with the fewest turns run, the longest of them first. ``batch``: those of
    groups with a lower number come first, of what does not run yet or takes turns."""
    begun: dict[int, list[int]] = defaultdict(list)
    for response in responses:
        if response.tokens:
            begun[response.place[0]].append(response.tokens)
    lengths = expected.of({response.place[0] for response in responses}, begun)

    def urgency(response: Unfinished) -> tuple[float, ...]:
        group, index = response.place
        length = max(lengths[group], response.tokens)
        if turn is not None:
            return batch(group), response.tokens // turn - 0.5 * response.running, -length, group, index
        return -response.running, batch(group), -bool(response.tokens), -length, group, index

    return sorted(responses, key=urgency)

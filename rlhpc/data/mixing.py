"""Several sources taken in given proportions: which one every position of an endless sequence belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

_MOST = 10_000  # positions after which the sequence repeats; weights that need more are rounded to parts of it


class Mixture:
    """An endless interleaving of sources by weight, each position a function of its number alone.

    Among the first n positions every source has its share of n to less than one, for any n, and exactly at multiples
    of ``period``: the schedule of Baruah et al. 1996 ("Proportionate progress"), whose j-th item of a source with
    share p must come at one of the positions floor(j / p) to ceil((j + 1) / p) - 1, by the earliest end first.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = _parts(weights)
        self.period = sum(self.parts)

    def place(self, position: int) -> tuple[int, int]:
        """The source at ``position``, and how many of its items come before."""
        passes, rest = divmod(position, self.period)
        source, before = self._sequence[rest]
        return source, passes * self.parts[source] + before

    @cached_property
    def _sequence(self) -> list[tuple[int, int]]:
        """``place`` of the first period."""
        period, parts = self.period, self.parts
        taken, sequence = [0] * len(parts), []
        for position in range(period):
            due = [
                (-(-(taken[i] + 1) * period // part), i)
                for i, part in enumerate(parts)
                if taken[i] * period // part <= position
            ]
            source = min(due)[1]
            sequence.append((source, taken[source]))
            taken[source] += 1
        return sequence


def _parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of the weights as they are written, none 0."""
    shares = [Fraction(str(weight)) for weight in weights]
    assert min(shares) > 0, "weights are positive"
    scale = lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    divisor = gcd(*whole)
    if sum(whole) // divisor <= _MOST:
        return tuple(number // divisor for number in whole)
    total = sum(shares)
    return tuple(max(1, round(share * _MOST / total)) for share in shares)

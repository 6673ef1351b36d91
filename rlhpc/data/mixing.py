"""Interleaves several sources by weight into one endless sequence."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

_MOST = 10_000  # maximum period; weights that would need a longer one are rounded


class Mixture:
    """Endless interleaving of sources by weight; the source of a position depends on the position alone.

    Among the first n positions, each source's count differs from its share of n by less than one, and by zero at
    multiples of ``period``. Schedule of Baruah et al. 1996 ("Proportionate progress"): item j of a source with share p
    must be placed between floor(j / p) and ceil((j + 1) / p) - 1, earliest deadline first.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = _parts(weights)
        self.period = sum(self.parts)

    def place(self, position: int) -> tuple[int, int]:
        """The source at ``position``, and the number of its earlier items."""
        passes, rest = divmod(position, self.period)
        source, before = self._sequence[rest]
        return source, passes * self.parts[source] + before

    @cached_property
    def _sequence(self) -> list[tuple[int, int]]:
        """``place`` of each position in the first period."""
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
    """Positive integers in proportion to the weights, exact for decimal weights."""
    shares = [Fraction(str(weight)) for weight in weights]
    assert min(shares) > 0, "weights are positive"
    scale = lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    divisor = gcd(*whole)
    if sum(whole) // divisor <= _MOST:
        return tuple(number // divisor for number in whole)
    total = sum(shares)
    return tuple(max(1, round(share * _MOST / total)) for share in shares)

"""How work and its results pass between models that are cut in different ways.

The patterns that HybridFlow (arXiv 2409.19256, table 3) calls transfer protocols: which ranks get the same part of a
list, and which one of them answers for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlhpc.sharding.layout import ParallelLayout

T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """Ranks that differ along ``axes``, the first one slowest, have parts of their own; all others share theirs."""

    name: str
    axes: tuple[str, ...]

    def parts(self, layout: ParallelLayout) -> int:
        """How many parts there are."""
        count = 1
        for axis in self.axes:
            count *= layout.size(axis)
        return count

    def part_of(self, layout: ParallelLayout, rank: int) -> int:
        """Which part is the rank's."""
        part, coord = 0, layout.coord(rank)
        for axis in self.axes:
            part = part * layout.size(axis) + coord[axis]
        return part

    def speaker(self, layout: ParallelLayout, part: int) -> int:
        """The first rank of a part: what it has is what all of them have."""
        return next(rank for rank in range(layout.world_size) if self.part_of(layout, rank) == part)

    def share(self, layout: ParallelLayout, rank: int, items: Sequence[T]) -> Sequence[T]:
        """The rank's part of ``items``: contiguous, and in length no two parts differ by more than one."""
        part, parts = self.part_of(layout, rank), self.parts(layout)
        return items[len(items) * part // parts : len(items) * (part + 1) // parts]


SPLIT_BY_DATA = Transfer("split_by_data", ("dp",))  # training: ranks of one model copy take the same batches
PIPELINE_AS_DATA = Transfer("pipeline_as_data", ("dp", "pp"))  # generation: each stage has a whole engine
ONE_TO_ALL = Transfer("one_to_all", ())  # everybody gets everything, the first rank's
EACH_RANK = Transfer("each_rank", ("dp", "pp", "cp", "tp"))  # every rank on its own

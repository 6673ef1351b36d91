"""Distribution of work and its results between models with different layouts.

HybridFlow (arXiv 2409.19256, table 3) calls these patterns transfer protocols: which ranks receive the same part of a
list, and which of them sends the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.sharding.layout import ParallelLayout


@dataclass(frozen=True)
class Transfer:
    """Gives ranks that differ along ``axes``, the first one slowest, different parts; other ranks share a part."""

    name: str
    axes: tuple[str, ...]

    def parts(self, layout: ParallelLayout) -> int:
        """Number of parts."""
        count = 1
        for axis in self.axes:
            count *= layout.size(axis)
        return count

    def part_of(self, layout: ParallelLayout, rank: int) -> int:
        """Index of the rank's part."""
        part, coord = 0, layout.coord(rank)
        for axis in self.axes:
            part = part * layout.size(axis) + coord[axis]
        return part

    def speaker(self, layout: ParallelLayout, part: int) -> int:
        """First rank of a part, which sends its result: all its ranks have the same."""
        return next(rank for rank in range(layout.world_size) if self.part_of(layout, rank) == part)


SPLIT_BY_DATA = Transfer("split_by_data", ("dp",))  # training: ranks of one model copy take the same batches
PIPELINE_AS_DATA = Transfer("pipeline_as_data", ("dp", "pp"))  # generation: each stage has a whole engine

"""Sizes of the mesh of a model that FSDP2 shards: copies of the weights, their shards, and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.sharding.layout import JOB_RANKS, ParallelLayout, divisors

REPLICATE, SHARD, CP = "dp_replicate", "dp_shard", "cp"
# Axes of Megatron's back end that FSDP2 has no counterpart of.
_OTHER_AXES = ("tp", "pp", "vpp", "first_stage_layers", "last_stage_layers", "ep", "etp")


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the mesh, outermost axis first: consecutive ranks share a sequence, then a copy of the weights.

    A copy of the weights is sharded over ``dp_shard`` x ``cp`` ranks: a reduction over them also sums the gradients of
    the ranks that share a sequence.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.shards

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the weights together."""
        return self.dp_shard * self.cp

    @property
    def dp(self) -> int:
        """Ranks, or groups of ``cp`` ranks, with batches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def text(self) -> str:
        return f"{REPLICATE} {self.dp_replicate} x {SHARD} {self.dp_shard} x {CP} {self.cp}"

    def shard_index(self, rank: int) -> int:
        """Index of the shard of the weights that the rank holds."""
        return rank % self.shards

    def check(self, ranks: int) -> None:
        """Raises UserError unless the sizes are positive and their product is the number of ranks."""
        if min(self.dp_replicate, self.dp_shard, self.cp) < 1 or self.world_size != ranks:
            raise UserError(
                f"{self.text} = {self.world_size} ranks, but there are {ranks} {JOB_RANKS}",
                where="actor.parallel",
                remedy=f"use positive sizes whose product is {ranks}",
            )


def make_mesh_sizes(parallel: ParallelSection, world_size: int) -> MeshSizes:
    """Sizes of a configuration on ``world_size`` ranks. Raises UserError for an axis of Megatron's back end, or sizes
    that do not divide the ranks."""
    others = [axis for axis in _OTHER_AXES if getattr(parallel, axis) not in (None, 1)]
    if others:
        raise UserError(
            f"{getattr(parallel, others[0])} with train.backend fsdp, which shards over dp_replicate and cp alone",
            where=f"actor.parallel.{others[0]}",
            remedy="leave it out, or use train.backend megatron",
        )
    copies, cp = parallel.dp_replicate, parallel.cp
    if world_size % (copies * cp):
        raise UserError(
            f"dp_replicate {copies} x cp {cp} = {copies * cp} ranks does not divide the {world_size} {JOB_RANKS}",
            where="actor.parallel",
            remedy=f"use sizes whose product is one of {divisors(world_size)}",
        )
    return MeshSizes(copies, world_size // (copies * cp), cp)


def mesh_layout(sizes: MeshSizes) -> ParallelLayout:
    """Layout of the ranks that share a batch: those along cp, in dp groups."""
    return ParallelLayout(sizes.world_size, cp=sizes.cp)


def held_rows(rows: int, shards: int, index: int) -> range:
    """Rows of a parameter that a shard holds: ceil(rows / shards) in each, so that the last ones may have none."""
    each = -(-rows // shards)
    return range(min(index * each, rows), min((index + 1) * each, rows))

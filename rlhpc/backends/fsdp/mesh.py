"""Device mesh of a model sharded by FSDP2: replicas of the weights, their shards, and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlhpc.core.errors import UserError
from rlhpc.sharding.layout import JOB_RANKS

REPLICATE, SHARD, CP, WEIGHTS = "dp_replicate", "dp_shard", "cp", "weights"


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
    def ranks(self) -> int:
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
        """Which shard of the weights the rank holds."""
        return rank % self.shards

    def dp_index(self, rank: int) -> int:
        """Which of the ``dp`` batches the rank has."""
        return rank // self.cp

    def check(self, ranks: int) -> None:
        """Raises UserError unless the sizes are positive and their product is the number of ranks."""
        if min(self.dp_replicate, self.dp_shard, self.cp) < 1 or self.ranks != ranks:
            raise UserError(
                f"{self.text} = {self.ranks} ranks, but there are {ranks} {JOB_RANKS}",
                where="actor.parallel",
                remedy=f"use positive sizes whose product is {ranks}",
            )


@dataclass(frozen=True)
class Meshes:
    """``weights``: ranks of one copy of the weights, or copies x those ranks with several copies (HSDP).

    ``cp``: ranks that share a sequence.
    """

    sizes: MeshSizes
    weights: DeviceMesh
    cp: DeviceMesh

    @property
    def copy_group(self) -> dist.ProcessGroup:
        """Ranks that hold one copy of the weights together, in the order of their shards."""
        return self.weights.get_group(WEIGHTS)


def make_meshes(sizes: MeshSizes, device_type: str) -> Meshes:
    """Makes the process groups. Collective over all ranks; raises UserError if the sizes are not those of the world."""
    sizes.check(dist.get_world_size())
    shape = (sizes.dp_replicate, sizes.dp_shard, sizes.cp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD, CP))
    weights = mesh[SHARD, CP]._flatten(WEIGHTS)
    return Meshes(sizes, mesh[REPLICATE, WEIGHTS] if sizes.dp_replicate > 1 else weights, mesh[CP])

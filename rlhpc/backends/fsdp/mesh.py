"""Device mesh of a model sharded by FSDP2: replicas of the weights, their shards, and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlhpc.sharding.mesh_sizes import CP, REPLICATE, SHARD, MeshSizes

WEIGHTS = "weights"


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

"""Weights that each rank of either training back end holds."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.models import ModelShape
from rlhpc.sharding.fsdp_shards import fsdp_shards
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.mesh_sizes import MeshSizes
from rlhpc.sharding.shards import Shard, megatron_shards

TrainerCut = ParallelLayout | MeshSizes  # of Megatron's back end; of FSDP2's


def trainer_side(shape: ModelShape, cut: TrainerCut, ranks: Sequence[int]) -> dict[int, list[Shard]]:
    """Shards of each rank of the job, in the order of the model's tensors; a layer's experts are one tensor.

    ``ranks``: those that train, in the order of the cut; perhaps only its first ones. Copies of the weights share
    lists.
    """
    if isinstance(cut, ParallelLayout):
        return {rank: megatron_shards(shape, cut, place, stacked=True) for place, rank in enumerate(ranks)}
    held = {index: fsdp_shards(shape, cut, index) for index in range(min(cut.shards, len(ranks)))}
    return {rank: held[cut.shard_index(place)] for place, rank in enumerate(ranks)}

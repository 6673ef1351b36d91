"""Weights that each rank of either training back end holds, computed without the model.

In a transformers model that FSDP2 shards, a parameter is sharded along its first dimension. The experts of a layer are
two parameters: gate_up_proj [experts, gate and up, hidden] and down_proj [experts, hidden, ffn] (transformers 5,
conversion_mapping.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlhpc.models import ModelShape
from rlhpc.models.tables import Cut
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.mesh_sizes import MeshSizes, held_rows
from rlhpc.sharding.shards import Box, Place, Shard, megatron_shards, tensor_places

TrainerCut = ParallelLayout | MeshSizes  # of Megatron's back end; of FSDP2's

# Modules that transformers 5 names otherwise than the files: Mixtral's.
_RENAMED = (("block_sparse_moe.", "mlp."),)


def trainer_side(shape: ModelShape, cut: TrainerCut, ranks: Sequence[int]) -> dict[int, list[Shard]]:
    """Shards of each rank of the job, in the order of the model's tensors; a layer's experts are one tensor.

    ``ranks``: those that train, in the order of the cut; perhaps only its first ones. Copies of the weights share
    lists.
    """
    if isinstance(cut, ParallelLayout):
        return {rank: megatron_shards(shape, cut, place, stacked=True) for place, rank in enumerate(ranks)}
    held = {index: fsdp_shards(shape, cut, index) for index in range(min(cut.shards, len(ranks)))}
    return {rank: held[cut.shard_index(place)] for place, rank in enumerate(ranks)}


def fsdp_shards(shape: ModelShape, sizes: MeshSizes, rank: int) -> list[Shard]:
    """Shards of one training rank, in the order of the model's tensors; a layer's experts are one tensor."""
    index = sizes.shard_index(rank)
    return [shard for place in tensor_places(shape, stacked=True) for shard in _held(place, sizes.shards, index)]


def _held(place: Place, shards: int, index: int) -> Iterator[Shard]:
    """The rows of a tensor that a shard holds, unless it holds none."""
    row, size = place.row, place.tensor.shape
    # A bias of the router is a buffer, which every rank has whole.
    rows = range(size[0]) if row.float32 else held_rows(size[0], shards, index)
    if not len(rows):
        return
    start, stop = [0] * len(size), list(size)
    start[0], stop[0] = rows.start, rows.stop
    at = [0] * len(size)
    if row.cut is Cut.EXPERT_GATE_UP:
        at[1] = row.part * size[1]
    yield Shard(place.tensor, Box(tuple(start), tuple(stop)), _parameter(place), tuple(at))


def _parameter(place: Place) -> str:
    name = place.tensor.name
    if place.row.of_each_expert:
        leaf = "gate_up_proj" if place.row.cut is Cut.EXPERT_GATE_UP else "down_proj"
        name = name.partition("*")[0] + leaf
    for stored, present in _RENAMED:
        name = name.replace(stored, present)
    return name


def without_stacks(shard: Shard) -> Iterator[Shard]:
    """A shard of a stack of experts as one shard for each expert; any other shard itself."""
    tensor, box = shard.tensor, shard.box
    if "*" not in tensor.name:
        yield shard
        return
    for expert in range(box.start[0], box.stop[0]):
        one = replace(tensor, name=tensor.name.replace("*", str(expert)), shape=tensor.shape[1:], expert=expert)
        start = (shard.local_start[0] + expert - box.start[0], *shard.local_start[1:])
        yield Shard(one, Box(box.start[1:], box.stop[1:]), shard.local_name, start, shard.chunk)

"""Checkpoint shards of master weights and moments, as pieces of whole parameters and without gathering.

A distributed optimizer splits flat buffers over the data-parallel ranks at any element. A rank's part of a parameter is
a few boxes of it, which are written and read in place. Keys and shapes are those of Megatron's ``fully_reshardable``
(distrib_optimizer.py:1404), which gathers whole parameters on every rank first: each can read the other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlhpc.sharding.shards import Box, flat_boxes

FORMAT = "fully_reshardable"
_STATE = {"param", "exp_avg", "exp_avg_sq"}
_KEY = "optimizer.state.{name}.{key}"


@dataclass(eq=False)
class Owned:
    """The rank's part of a parameter: its elements ``start`` to ``stop``, and their float32 tensors by Megatron's names
    ("param" is the master weights)."""

    part: Any  # Megatron's optimizer of the parameter
    parameter: Tensor
    start: int
    stop: int
    tensors: dict[str, Tensor]

    def put_back(self) -> None:
        """Sets the optimizer's state to what was read into ``tensors``, which may be copies."""
        self.part._set_main_param_and_optimizer_states(self.parameter, self.tensors)


@dataclass(frozen=True)
class Fragment:
    """A box of the rank's parameter that is saved as a block of one tensor; gate and up are two fragments."""

    box: Box
    target: ShardedTensor


def common_state(optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """Parameter groups with rates and step counts in Megatron's layout; equal on every rank."""
    parts = optimizer_parts(optimizer)
    if len(parts) > 1:
        optimizer._synchronize_steps()
    states = {number: {**part.state_dict(), "param_state_sharding_type": FORMAT} for number, part in enumerate(parts)}
    return states if len(parts) > 1 else states[0]


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizers inside one: of the dense parameters and of the experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def owned_state(optimizer: MegatronOptimizer) -> Iterator[Owned]:
    """State on this rank, parameter by parameter."""
    for part in optimizer_parts(optimizer):
        for buffer in part.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        tensors = part._get_main_param_and_optimizer_states(parameter)
                        assert tensors.keys() == _STATE, f"the optimizer stores {sorted(tensors)}"
                        yield Owned(part, parameter, ranges["param"].start, ranges["param"].end, tensors)


def state_shards(owned: Sequence[Owned], models: dict[str, Any]) -> dict[str, ShardedTensor]:
    """Views of ``owned`` as blocks of whole tensors; ``models``: the modules' sharded state."""
    described = {
        entry.data: entry for entry in nested_values(models) if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    shards = [
        shard
        for part in owned
        for name, values in part.tensors.items()
        for shard in _shards(part, values, fragments(described[part.parameter], name))
    ]
    return {str(number): shard for number, shard in enumerate(shards)}


def fragments(described: ShardedTensor | ShardedTensorFactory, name: str) -> list[Fragment]:
    """Places at which a parameter's state ``name`` is saved, from the description of the parameter itself."""
    key, local = _KEY.format(name=name, key=described.key), described.data
    # A factory's parts are views of its argument: their offsets in it determine their boxes.
    whole = torch.empty(local.shape, dtype=torch.float32, device="meta")
    assert len(described.replica_id) == 3, f"{described.key}: (pp, tp, dp) expected, not {described.replica_id}"
    replica = (*described.replica_id[:2], 0)  # data-parallel ranks have different parts, not copies
    if isinstance(described, ShardedTensorFactory):
        targets = list(nested_values(described.build_fn(key, whole, replica, None)))
    else:
        targets = [replace(described, key=key, data=whole, dtype=whole.dtype, replica_id=replica)]
    found = [Fragment(_box(target.data, whole), target) for target in targets]
    assert sum(fragment.box.volume for fragment in found) == whole.numel(), f"{key}: the parts are not views"
    return found


def _box(view: Tensor, whole: Tensor) -> Box:
    assert view.stride() == whole.stride(), f"{tuple(view.shape)} is not a box of {tuple(whole.shape)}"
    start, rest = [], view.storage_offset()
    for size in whole.stride():
        at, rest = divmod(rest, size)
        start.append(at)
    return Box(tuple(start), tuple(a + n for a, n in zip(start, view.shape, strict=True)))


def _shards(owned: Owned, values: Tensor, places: Sequence[Fragment]) -> Iterator[ShardedTensor]:
    assert values.numel() == owned.stop - owned.start, "the state differs in size from the rank's part"
    flat, at = values.detach().view(-1), 0
    for box in flat_boxes(tuple(owned.parameter.shape), owned.start, owned.stop):
        block = flat[at : at + box.volume].view(box.shape)
        at += box.volume
        for place in places:
            met = box.meet(place.box)
            if met is not None:
                yield _shard(block[_within(met, box)], met, place)


def _shard(block: Tensor, met: Box, place: Fragment) -> ShardedTensor:
    """The block as a shard without ``prepend_axis_num``: only then Megatron accepts blocks of unequal sizes."""
    target = place.target
    lead = target.prepend_axis_num
    moved = (at - first for at, first in zip(met.start, place.box.start, strict=True))
    offset = (*target.global_offset[:lead], *map(sum, zip(target.global_offset[lead:], moved, strict=True)))
    data = block[(None,) * lead]
    return replace(
        target,
        data=data,
        local_shape=tuple(data.shape),
        global_offset=offset,
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(box.start, box.stop, outer.start, strict=True))

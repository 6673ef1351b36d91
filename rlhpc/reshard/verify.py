"""Compares checksums of the engine's weights with the trainer's, slot by slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor

from rlhpc.reshard.checksum import checksum
from rlhpc.reshard.checksum_plan import ChecksumPlan, is_stack
from rlhpc.reshard.executor import View
from rlhpc.sharding.shards import Shard


def differing(
    plan: ChecksumPlan,
    read: View,
    written: View,
    wire_dtype: Callable[..., torch.dtype],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[str]:
    """Names of the weights of this rank's engine that differ from the trainer's. Collective over the group."""
    expected = expected_sums(plan, read, wire_dtype, device)
    dist.all_reduce(expected, group=group)
    return differing_from(expected, plan, written, wire_dtype)


def expected_sums(
    plan: ChecksumPlan, read: View, wire_dtype: Callable[..., torch.dtype], device: torch.device
) -> Int64[Tensor, " slots"]:
    """This rank's terms of the trainer's checksums; their sum over all ranks is what engines must have."""
    expected = torch.zeros(plan.num_slots, dtype=torch.int64, device=device)
    for part in plan.expected:
        block = read(part.shard).to(device, wire_dtype(part.shard.tensor))  # it may be in CPU memory
        sums = checksum(block, part.shard)
        expected[part.slot : part.slot + len(sums)] += sums
    return expected


def differing_from(
    expected: Int64[Tensor, " slots"], plan: ChecksumPlan, written: View, wire_dtype: Callable[..., torch.dtype]
) -> list[str]:
    """Names of the weights of this rank's engine whose checksums are not the trainer's. Engines have some parameters in
    float32 that are sent in the model's dtype, in which they are compared."""
    found = []
    for part in plan.actual:
        sums = _written_sums(written(part.shard), part.shard, wire_dtype(part.shard.tensor))
        found.append((part.shard, sums != expected[part.slot : part.slot + len(sums)]))
    if not found or not torch.cat([wrong for _, wrong in found]).any():
        return []
    return [name_of(shard, index) for shard, wrong in found for index in wrong.nonzero().flatten().tolist()]


def _written_sums(block: Tensor, shard: Shard, dtype: torch.dtype) -> Int64[Tensor, " sums"]:
    """Checksum of an engine's block in the dtype that it was sent in; another number if it holds more than that."""
    sent = block.to(dtype)
    sums = checksum(sent, shard)
    return sums if sent is block or torch.equal(sent.to(block.dtype), block) else ~sums


def name_of(shard: Shard, index: int) -> str:
    """HuggingFace's name of the weight, with the index ranges where the rank holds only a part of it.

    ``index`` is the expert within a stack's box.
    """
    name, box, shape = shard.tensor.name, shard.box, shard.tensor.shape
    start, stop = box.start, box.stop
    if is_stack(shard.tensor):
        name, start, stop, shape = name.replace("*", str(start[0] + index)), start[1:], stop[1:], shape[1:]
    ranges = [f"{a}:{b}" for a, b in zip(start, stop, strict=True)]
    return name if (start, stop) == ((0,) * len(shape), shape) else f"{name}[{', '.join(ranges)}]"

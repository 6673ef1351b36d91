"""Compares checksums of the engine's weights with the trainer's, slot by slot.

A checksum adds up over disjoint boxes of a tensor, regardless of how it is cut. It sums each element's bits, read as an
integer, times an odd weight that depends on its coordinates in the whole tensor, modulo 2^64. One changed element
always changes the sum; swapped elements, rows or experts almost always do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor

from rlhpc.reshard.checksum_plan import ChecksumPlan, is_stack
from rlhpc.reshard.executor import View
from rlhpc.sharding.shards import Shard

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK, _CHUNK_GPU = 1 << 20, 1 << 24  # elements widened to 64 bits at a time; on a GPU more, for fewer kernels
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889, 1609587929392839161)  # odd primes of xxHash64


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


def checksum(block: Tensor, shard: Shard) -> Int64[Tensor, " sums"]:
    """Checksum of a shard whose elements are in ``block``: one number, or one per expert of a stack."""
    stack = is_stack(shard.tensor)
    block = block if stack else block[None]
    matrices = block.view(_BITS[block.element_size()]).reshape(block.shape[0], -1, block.shape[-1])
    start = shard.box.start[1:] if stack else shard.box.start or (0,)  # a scalar has one element
    rows, columns = (start[0], start[-1]) if len(start) > 1 else (0, start[0])
    weights = _weights(columns, matrices.shape[2], 1, block.device)
    row_weights = _weights(rows, matrices.shape[1], 2, block.device)
    return torch.stack([_matrix_sum(matrix, row_weights, weights) for matrix in matrices])


def _matrix_sum(matrix: Tensor, row_weights: Tensor, weights: Tensor) -> Int64[Tensor, ""]:
    """Processes a few rows at a time to limit memory."""
    step = max(1, (_CHUNK_GPU if matrix.is_cuda else _CHUNK) // matrix.shape[1])
    sums = [(part.to(torch.int64) * weights).sum(-1) for part in matrix.split(step)]
    return (torch.cat(sums) * row_weights).sum()


def _weights(start: int, count: int, seed: int, device: torch.device) -> Int64[Tensor, " count"]:
    """Odd pseudo-random numbers for the indices from ``start``, mixed as in splitmix64."""
    mixed = (torch.arange(start, start + count, device=device) + 1) * _MULTIPLIERS[0] + seed * _MULTIPLIERS[2]
    for multiplier in _MULTIPLIERS[1:]:
        mixed = (mixed ^ (mixed >> 29)) * multiplier
    return (mixed ^ (mixed >> 32)) | 1

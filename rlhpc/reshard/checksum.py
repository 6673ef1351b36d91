"""A checksum that adds up over disjoint boxes of a tensor, regardless of how it is cut.

Sums each element's bits, read as an integer, times an odd weight that depends on its coordinates in the whole tensor,
modulo 2^64. One changed element always changes the sum; swapped elements, rows or experts almost always do.
"""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from rlhpc.reshard.checksum_plan import is_stack
from rlhpc.sharding.shards import Shard

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK, _CHUNK_GPU = 1 << 20, 1 << 24  # elements widened to 64 bits at a time; on a GPU more, for fewer kernels
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889, 1609587929392839161)  # odd primes of xxHash64


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

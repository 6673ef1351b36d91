"""rlhpc.reshard.checksum in numpy, for a block of an unstacked tensor; independent of how the tensor is split."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rlhpc.checkpoint.formats.arrays import Array
from rlhpc.sharding.shards import Box

_BITS = {1: np.int8, 2: np.int16, 4: np.int32}
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
_CHUNK = 1 << 19  # elements widened to 64 bits per step


def checksum(block: Array, box: Box) -> int:
    """Checksum of a box of a tensor, as a signed 64-bit number; those of disjoint boxes add up modulo 2^64."""
    matrix = block.view(_BITS[block.itemsize]).reshape(-1, block.shape[-1])
    rows, columns = (box.start[0], box.start[-1]) if len(box.start) > 1 else (0, box.start[0])
    weights = _weights(columns, matrix.shape[1], 1)
    row_weights = _weights(rows, matrix.shape[0], 2)
    step = max(1, _CHUNK // matrix.shape[1])
    total = np.zeros((), np.int64)
    with np.errstate(over="ignore"):
        for at in range(0, len(matrix), step):
            sums = (matrix[at : at + step].astype(np.int64) * weights).sum(1)
            total += (sums * row_weights[at : at + step]).sum()
    return int(total)


def add(first: int, second: int) -> int:
    """Sum modulo 2^64, as a signed number."""
    total = (first + second) & (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total


@lru_cache(maxsize=64)
def _weights(start: int, count: int, seed: int) -> Array:
    with np.errstate(over="ignore"):
        first = np.array([_MULTIPLIERS[0], _MULTIPLIERS[1], _MULTIPLIERS[2]], np.int64)
        mixed = (np.arange(start, start + count, dtype=np.int64) + 1) * first[0] + np.int64(seed) * first[2]
        for multiplier in first[1:]:
            mixed = (mixed ^ (mixed >> np.int64(29))) * multiplier
        return (mixed ^ (mixed >> np.int64(32))) | np.int64(1)

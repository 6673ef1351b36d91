"""Arithmetic on ragged rows: rows of ``lengths`` tokens laid end to end, N in all."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def owners(lengths: Int64[Tensor, " B"]) -> Int64[Tensor, " N"]:
    """The row of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def row_sums(values: Float[Tensor, " N"], rows: Int64[Tensor, " N"], count: int) -> Float[Tensor, " B"]:
    """Sum of each of ``count`` rows; ``rows`` are the tokens' owners."""
    return values.new_zeros(count).index_add_(0, rows, values)


def accumulate_backwards(
    values: Float[Tensor, " N"], decay: Float[Tensor, " N"], lengths: Int64[Tensor, " B"]
) -> Float[Tensor, " N"]:
    """y[t] = values[t] + decay[t] y[t + 1] within each row, in log2(longest row) passes over all of them."""
    result, decay = values.clone(), decay.clone()
    decay[lengths.cumsum(0)[lengths > 0] - 1] = 0.0  # rows do not mix
    longest = int(lengths.max()) if len(lengths) else 0
    step = 1
    while step < longest:
        result[:-step] = result[:-step] + decay[:-step] * result[step:]
        decay[:-step] = decay[:-step] * decay[step:]
        decay[-step:] = 0.0
        step *= 2
    return result


def shift_back(values: Float[Tensor, " N"], lengths: Int64[Tensor, " B"]) -> Float[Tensor, " N"]:
    """Each token's successor's value, 0 for the last one of a row."""
    shifted = torch.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[lengths.cumsum(0)[lengths > 0] - 1] = 0.0
    return shifted

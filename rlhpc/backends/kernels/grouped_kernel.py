"""Triton kernel of the gradients of experts' weights. Imported on a GPU only."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32
from torch import Tensor

_TILE, _ROWS = 128, 64
OPTIONS = {"num_warps": 8, "num_stages": 3}


def launch(
    buffer: Float32[Tensor, "groups outer inner"],
    output_gradient: Float[Tensor, "N outer"],
    x: Float[Tensor, "N inner"],
    ends: Int32[Tensor, " groups"],
    kernel: Any = None,
) -> None:
    """Adds output_gradient.T @ x of each group's rows to its matrix of the buffer. All tensors are contiguous."""
    groups, outer, inner = buffer.shape
    grid = (triton.cdiv(inner, _TILE), triton.cdiv(outer, _TILE), groups)
    (kernel or add_products)[grid](buffer, output_gradient, x, ends, outer, inner, TILE=_TILE, ROWS=_ROWS, **OPTIONS)


@triton.jit
def add_products(buffer, output_gradient, x, ends, outer, inner, TILE: tl.constexpr, ROWS: tl.constexpr):  # noqa: PLR0913
    """One tile of one group. One program adds all its rows, in their order: two runs are bit-equal."""
    group = tl.program_id(2)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    if begin < end:  # the matrix of an expert without rows is neither read nor written
        out = tl.program_id(1) * TILE + tl.arange(0, TILE)
        into = tl.program_id(0) * TILE + tl.arange(0, TILE)
        total = tl.full((TILE, TILE), 0.0, dtype=tl.float32)
        for first in range(begin, end, ROWS):
            rows = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            left = tl.load(
                output_gradient + rows * outer + out[None, :], mask=(rows < end) & (out[None, :] < outer), other=0.0
            )
            right = tl.load(x + rows * inner + into[None, :], mask=(rows < end) & (into[None, :] < inner), other=0.0)
            total += tl.dot(tl.trans(left), right)
        place = buffer + group.to(tl.int64) * outer * inner + out[:, None].to(tl.int64) * inner + into[None, :]
        inside = (out[:, None] < outer) & (into[None, :] < inner)
        tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)

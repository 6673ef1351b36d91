"""Triton kernel of the gradients of experts' weights. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

_TILE, _ROWS = 128, 64
OPTIONS = {"num_warps": 8, "num_stages": 3}


def launch(
    buffer: Float32[Tensor, "groups outer inner"],
    output_gradient: Float[Tensor, "T_or_N outer"],
    x: Float[Tensor, "T_or_N inner"],
    ends: Int32[Tensor, " groups"],
    gradient_rows: Int64[Tensor, " N"] | None = None,
    x_rows: Int64[Tensor, " N"] | None = None,
) -> None:
    """Adds output_gradient.T @ x of each group's rows to its matrix of the buffer. All tensors are contiguous.

    ``gradient_rows`` and ``x_rows``: which row of theirs each of the N rows is; None: they are the N rows.
    """
    groups, outer, inner = buffer.shape
    grid = (triton.cdiv(inner, _TILE), triton.cdiv(outer, _TILE), groups)
    operands = (buffer, output_gradient, x, ends, gradient_rows, x_rows, outer, inner)
    add_products[grid](*operands, TILE=_TILE, ROWS=_ROWS, **OPTIONS)


@triton.jit
def add_products(  # noqa: PLR0913
    buffer, output_gradient, x, ends, gradient_rows, x_rows, outer, inner, TILE: tl.constexpr, ROWS: tl.constexpr
):
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
            inside = rows < end
            of_gradient = rows if gradient_rows is None else tl.load(gradient_rows + rows, mask=inside, other=0)
            of_x = rows if x_rows is None else tl.load(x_rows + rows, mask=inside, other=0)
            from_gradient = output_gradient + of_gradient * outer + out[None, :]
            left = tl.load(from_gradient, mask=inside & (out[None, :] < outer), other=0.0)
            right = tl.load(x + of_x * inner + into[None, :], mask=inside & (into[None, :] < inner), other=0.0)
            total += tl.dot(tl.trans(left), right)
        place = buffer + group.to(tl.int64) * outer * inner + out[:, None].to(tl.int64) * inner + into[None, :]
        held = (out[:, None] < outer) & (into[None, :] < inner)
        tl.store(place, tl.load(place, mask=held, other=0.0) + total, mask=held)

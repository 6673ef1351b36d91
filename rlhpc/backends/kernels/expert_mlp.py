"""SwiGLU MLPs of a rank's experts on the rows that chose them, as one step of autograd.

It keeps the tokens, not a copy for each expert, and the gate and up products: rows and activations are made again in
the backward pass. No step waits for a count of rows: products of groups of rows with a matrix of each group, and the
gradients of these matrices, are computed on a host that knows no sizes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from rlhpc.backends.kernels.choices import SortedChoices, summed, values_of_choices
from rlhpc.backends.kernels.compiled import compiled, compiles
from rlhpc.backends.kernels.swiglu import weighted_swiglu, weighted_swiglu_backward


def expert_mlp(
    x: Float[Tensor, "T hidden"],
    weights: Float32[Tensor, "T k"],
    w13: Float[Tensor, "experts 2*ffn hidden"],
    w2: Float[Tensor, "experts hidden ffn"],
    choices: SortedChoices,
) -> Float[Tensor, "T hidden"]:
    """Sum over a token's choices of w2 (silu(gate) up weight), with the experts that it chose."""
    return _ExpertMlp.apply(x, weights, w13, w2, choices)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, choices: SortedChoices) -> Tensor:
        # Parameters stay the objects that have main_grad, which what saved_tensors returns may not be.
        ctx.experts, ctx.partial = (w13, w2), choices.partial
        gate_up = _gate_up(x, w13, choices)
        ctx.save_for_backward(x, weights, gate_up, choices.order, choices.tokens, choices.places, choices.ends)
        activated = weighted_swiglu(gate_up, weights.flatten(), choices.order)
        output = grouped_product(activated, w2.transpose(1, 2), choices.ends)
        return summed(output, choices.places, partial=choices.partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, order, tokens, places, ends = ctx.saved_tensors
        w13, w2 = ctx.experts
        of_x = of_w13 = of_w2 = None
        of_activated = grouped_product(gradient.index_select(0, tokens), w2, ends)
        of_gate_up, activated, of_weights = weighted_swiglu_backward(gate_up, weights.flatten(), order, of_activated)
        del gate_up, of_activated
        if ctx.needs_input_grad[3]:
            of_w2 = grouped_weight_gradient(w2, gradient, activated, ends, gradient_rows=tokens)
        del activated
        if ctx.needs_input_grad[0]:
            of_x = summed(grouped_product(of_gate_up, w13, ends), places, partial=ctx.partial)
        if ctx.needs_input_grad[2]:
            of_w13 = grouped_weight_gradient(w13, of_gate_up, x, ends, x_rows=tokens)
        return of_x, values_of_choices(of_weights, places, partial=ctx.partial), of_w13, of_w2, None


def _gate_up(x: Tensor, w13: Tensor, choices: SortedChoices) -> Float[Tensor, "N 2*ffn"]:
    return grouped_product(x.index_select(0, choices.tokens), w13.transpose(1, 2), choices.ends)


_log = logging.getLogger(__name__)
_kernel_failed = False


def grouped_product(
    rows: Float[Tensor, "N inner"], weight: Float[Tensor, "groups inner outer"], ends: Int32[Tensor, " groups"]
) -> Float[Tensor, "N outer"]:
    """Rows up to ends[0] times weight[0], and so on."""
    if not len(rows):
        return rows.new_zeros(0, weight.size(2))
    if _has_grouped_mm(rows):
        return F.grouped_mm(rows, weight, offs=ends)
    return torch.cat([part @ one for part, one in zip(_parts(rows, ends), weight, strict=True)])


def grouped_weight_gradient(
    weight: Float[Tensor, "groups outer inner"],
    output_gradient: Float[Tensor, "T_or_N outer"],
    x: Float[Tensor, "T_or_N inner"],
    ends: Int32[Tensor, " groups"],
    *,
    gradient_rows: Int64[Tensor, " N"] | None = None,
    x_rows: Int64[Tensor, " N"] | None = None,
) -> Float[Tensor, "groups outer inner"]:
    """Gradient of ``weight`` in the grouped product of x with its transpose, for a backward pass to return.

    ``gradient_rows`` and ``x_rows``: which row of theirs each of the N rows is; None: they are the N rows. As
    ``weight_gradient`` (gradients.py): a float32 buffer receives it, and what is returned is without content then.
    """
    buffer = getattr(weight, "main_grad", None)
    rows = len(x if x_rows is None else x_rows)
    if buffer is None:
        if not rows:
            return torch.zeros_like(weight)
        left, right = _taken(output_gradient, gradient_rows), _taken(x, x_rows)
        return _of_groups_with_rows(_product_of_transposed(left, right, ends), ends)
    if rows:
        add_grouped_product(buffer, output_gradient, x, ends, gradient_rows, x_rows)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight, requires_grad=False)


def add_grouped_product(
    buffer: Float[Tensor, "groups outer inner"],
    output_gradient: Float[Tensor, "T_or_N outer"],
    x: Float[Tensor, "T_or_N inner"],
    ends: Int32[Tensor, " groups"],
    gradient_rows: Int64[Tensor, " N"] | None = None,
    x_rows: Int64[Tensor, " N"] | None = None,
) -> None:
    """Adds output_gradient.T @ x of each group to the buffer: on a GPU by one kernel, without copies of rows and
    without a product in memory."""
    if not _added_by_kernel(buffer, output_gradient, x, ends, gradient_rows, x_rows):
        left, right = _taken(output_gradient, gradient_rows), _taken(x, x_rows)
        _add_of_groups_with_rows(buffer, _product_of_transposed(left, right, ends), ends)


def _added_by_kernel(
    buffer: Float32[Tensor, "groups outer inner"], left: Tensor, right: Tensor, *indices: Tensor | None
) -> bool:
    """True if the Triton kernel has added the product. Where it cannot be compiled, nothing has changed."""
    global _kernel_failed
    contiguous = buffer.is_contiguous() and left.is_contiguous() and right.is_contiguous()
    dtypes = left.dtype is right.dtype is torch.bfloat16 and buffer.dtype is torch.float32
    if _kernel_failed or not (compiles() and right.is_cuda and contiguous and dtypes):
        return False
    try:
        from rlhpc.backends.kernels.grouped_kernel import launch

        launch(buffer, left, right, *indices)
    except Exception as error:
        _kernel_failed = True
        _log.warning("gradients of experts are added without a kernel: %s", str(error).partition("\n")[0])
        return False
    return True


def _taken(matrix: Tensor, rows: Tensor | None) -> Tensor:
    return matrix if rows is None else matrix.index_select(0, rows)


def _product_of_transposed(
    left: Float[Tensor, "N outer"], right: Float[Tensor, "N inner"], ends: Int32[Tensor, " groups"]
) -> Float[Tensor, "groups outer inner"]:
    if _has_grouped_mm(right):
        return F.grouped_mm(left.t(), right, offs=ends)
    pairs = zip(_parts(left, ends), _parts(right, ends), strict=True)
    return torch.stack([one.t() @ other for one, other in pairs])


@compiled
def _of_groups_with_rows(product: Tensor, ends: Tensor) -> Tensor:
    """On Blackwell ``grouped_mm`` leaves the product of a group without rows uninitialized (pytorch#172439)."""
    rows = ends.diff(prepend=ends.new_zeros(1))
    return torch.where((rows > 0)[:, None, None], product, 0)


@compiled
def _add_of_groups_with_rows(buffer: Tensor, product: Tensor, ends: Tensor) -> None:
    rows = ends.diff(prepend=ends.new_zeros(1))
    buffer += torch.where((rows > 0)[:, None, None], product, 0)


def _has_grouped_mm(rows: Tensor) -> bool:
    """On a GPU PyTorch has the grouped product for bfloat16 only."""
    return not rows.is_cuda or rows.dtype is torch.bfloat16


def _parts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.tensor_split(ends[:-1].tolist())

"""SwiGLU MLPs of a rank's experts on the rows that chose them, as one step of autograd.

It keeps the tokens, not a copy for each expert, and the gate and up products: rows and activations are made again in
the backward pass. No step waits for a count of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from rlhpc.backends.kernels.choices import SortedChoices, summed, values_of_choices
from rlhpc.backends.kernels.compiled import compiled
from rlhpc.backends.kernels.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward


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
        rows = x.index_select(0, choices.tokens)
        gate_up = grouped_product(rows, w13.transpose(1, 2), choices.ends)
        del rows
        activated = weighted_swiglu(gate_up, weights.flatten(), choices.order)
        output = grouped_product(activated, w2.transpose(1, 2), choices.ends)
        ctx.save_for_backward(x, weights, gate_up, choices.order, choices.tokens, choices.places, choices.ends)
        return summed(output, choices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, *indices = ctx.saved_tensors
        choices, (w13, w2) = SortedChoices(*indices, partial=ctx.partial), ctx.experts
        rows = gradient.index_select(0, choices.tokens)
        of_activated = grouped_product(rows, w2, choices.ends)
        of_gate_up, activated, of_weights = weighted_swiglu_backward(
            gate_up, weights.flatten(), choices.order, of_activated
        )
        del gate_up, of_activated
        of_w2 = grouped_weight_gradient(w2, rows, activated, choices.ends) if ctx.needs_input_grad[3] else None
        del rows, activated
        of_x = summed(grouped_product(of_gate_up, w13, choices.ends), choices) if ctx.needs_input_grad[0] else None
        of_w13 = None
        if ctx.needs_input_grad[2]:
            of_w13 = grouped_weight_gradient(w13, of_gate_up, x.index_select(0, choices.tokens), choices.ends)
        return of_x, values_of_choices(of_weights, choices), of_w13, of_w2, None


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
    output_gradient: Float[Tensor, "N outer"],
    x: Float[Tensor, "N inner"],
    ends: Int32[Tensor, " groups"],
) -> Float[Tensor, "groups outer inner"]:
    """Gradient of ``weight`` in the grouped product of x with its transpose, for a backward pass to return.

    As ``weight_gradient`` (gradients.py): a float32 buffer receives it, and what is returned is without content then.
    """
    buffer = getattr(weight, "main_grad", None)
    if not len(x):
        product = None
    elif _has_grouped_mm(x):
        product = F.grouped_mm(output_gradient.t(), x, offs=ends)
    else:
        pairs = zip(_parts(output_gradient, ends), _parts(x, ends), strict=True)
        product = torch.stack([left.t() @ right for left, right in pairs])
    if buffer is None:
        return torch.zeros_like(weight) if product is None else _of_experts_with_rows(product, ends)
    if product is not None:
        _add_of_experts_with_rows(buffer, product, ends)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight, requires_grad=False)


@compiled
def _of_experts_with_rows(product: Tensor, ends: Tensor) -> Tensor:
    """On Blackwell ``grouped_mm`` leaves the product of an expert without rows uninitialized (pytorch#172439)."""
    rows = ends.diff(prepend=ends.new_zeros(1))
    return torch.where((rows > 0)[:, None, None], product, 0)


@compiled
def _add_of_experts_with_rows(buffer: Tensor, product: Tensor, ends: Tensor) -> None:
    rows = ends.diff(prepend=ends.new_zeros(1))
    buffer += torch.where((rows > 0)[:, None, None], product, 0)


def _has_grouped_mm(rows: Tensor) -> bool:
    """On a GPU PyTorch has the grouped product for bfloat16 only."""
    return not rows.is_cuda or rows.dtype is torch.bfloat16


def _parts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.tensor_split(ends[:-1].tolist())

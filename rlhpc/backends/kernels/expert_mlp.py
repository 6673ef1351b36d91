"""SwiGLU MLPs of a rank's experts on the rows that chose them, as one step of autograd.

It keeps the tokens, not a copy for each expert, and the gate and up products: rows and activations are made again in
the backward pass. No step waits for a count of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from rlhpc.backends.kernels.choices import SortedChoices, summed, values_of_choices
from rlhpc.backends.kernels.grouped import grouped_product, grouped_weight_gradient
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

"""SwiGLU (Shazeer 2020) with the product after it, which keeps gate and up alone, and SwiGLU of experts' rows.

That of experts' rows is multiplied by the weights of their routes, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from rlhpc.backends.kernels.compiled import compiled
from rlhpc.backends.kernels.gradients import weight_gradient


def swiglu_linear(gate_up: Float[Tensor, "... 2*ffn"], weight: Float[Tensor, "out ffn"]) -> Float[Tensor, "... out"]:
    """(silu(gate) * up) @ weight.T; ``gate_up``: gate, then up. The backward pass makes the activation again."""
    return _SwigluLinear.apply(gate_up, weight)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return activated(gate_up).matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up, weight = ctx.saved_tensors
        of_product, again = activation_gradients(gradient.matmul(weight), gate_up)
        if not ctx.needs_input_grad[1]:
            return of_product, None
        return of_product, weight_gradient(weight, gradient.flatten(0, -2), again.flatten(0, -2))


@compiled
def activated(gate_up: Float[Tensor, "... 2*ffn"]) -> Float[Tensor, "... ffn"]:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@compiled
def activation_gradients(gradient: Float[Tensor, "... ffn"], gate_up: Float[Tensor, "... 2*ffn"]) -> tuple[Tensor, ...]:
    """Gradient of gate and up, and the activation."""
    gate, up = gate_up.chunk(2, dim=-1)
    silu = F.silu(gate)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat([of_gate, gradient * silu], dim=-1), silu * up


@compiled
def weighted_swiglu(
    gate_up: Float[Tensor, "N 2*ffn"], weights: Float32[Tensor, " choices"], order: Int64[Tensor, " N"]
) -> Float[Tensor, "N ffn"]:
    """silu(gate) * up * weight; the weight of row i is weights[order[i]]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up * weights[order][:, None]).to(gate_up.dtype)


@compiled
def weighted_swiglu_backward(
    gate_up: Float[Tensor, "N 2*ffn"],
    weights: Float32[Tensor, " choices"],
    order: Int64[Tensor, " N"],
    gradient: Float[Tensor, "N ffn"],
) -> tuple[Float[Tensor, "N 2*ffn"], Float[Tensor, "N ffn"], Float32[Tensor, " N"]]:
    """(gradient of gate_up, the output again, gradient of each row's weight)"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    weight, of_output = weights[order][:, None], gradient.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    product = silu * up
    of_weight = (of_output * product).sum(-1)
    of_product = of_output * weight
    of_gate = of_product * up * sigmoid * (1 + gate * (1 - sigmoid))
    of_gate_up = torch.cat([of_gate, of_product * silu], dim=-1)
    return of_gate_up.to(gate_up.dtype), (product * weight).to(gate_up.dtype), of_weight

"""SwiGLU of the rows of experts, times the weights of their routes; float32 inside."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from rlhpc.backends.kernels.compiled import compiled


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

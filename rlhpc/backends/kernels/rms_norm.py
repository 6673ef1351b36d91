"""Root-mean-square norm (Zhang and Sennrich 2019) that keeps its input and one number for each row."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from rlhpc.backends.kernels.compiled import compiled


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float) -> Float[Tensor, "... d"]:
    """x / sqrt(mean(x²) + eps) * weight, computed in float32."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, of_weight = _norm_gradients(gradient, x, weight, scale)
        return of_x, of_weight if ctx.needs_input_grad[1] else None, None


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Float32[Tensor, "... 1"]]:
    """The norm, and 1 / sqrt(mean(x²) + eps) of each row."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype), scale


def norm_gradients(
    gradient: Float[Tensor, "... d"],
    x: Float[Tensor, "... d"],
    weight: Float[Tensor, " d"],
    scale: Float32[Tensor, "... 1"],
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight, computed in float32."""
    unit, wide = x.float() * scale, gradient.float()
    of_weight = (wide * unit).flatten(0, -2).sum(0)
    wide = wide * weight.float()
    of_x = scale * (wide - unit * (wide * unit).mean(-1, keepdim=True))
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


_normed = compiled(normed)
_norm_gradients = compiled(norm_gradients)

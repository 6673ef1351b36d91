"""Rotary embedding (Su et al. 2021), halves convention: transformers' apply_rotary_pos_emb.

A rotation's backward pass turns the gradient back: nothing of its own is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from rlhpc.backends.kernels.compiled import compiled
from rlhpc.backends.kernels.rms_norm import norm_gradients, normed

Heads = Float[Tensor, "T heads d"]


def rotate(x: Heads, cos: Float32[Tensor, "T d"], sin: Float32[Tensor, "T d"]) -> Heads:
    """Rotates each head of each token by the token's angles."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _rotated_back(gradient, *ctx.saved_tensors), None, None


def split_rotated(
    fused: Float[Tensor, "T kv_heads queries+2 d"], cos: Float32[Tensor, "T d"], sin: Float32[Tensor, "T d"]
) -> tuple[Heads, Heads, Heads]:
    """Queries, keys and values of a fused projection, whose heads are grouped: the queries of a key, the key, its
    value. Queries and keys are rotated. The projection's output is not kept."""
    return _SplitRotated.apply(fused, cos, sin)


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _split(fused, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _joined_back(*gradients, *ctx.saved_tensors), None, None


def split_normed_rotated(
    fused: Float[Tensor, "T kv_heads queries+2 d"],
    cos: Float32[Tensor, "T d"],
    sin: Float32[Tensor, "T d"],
    query_weight: Float[Tensor, " d"],
    key_weight: Float[Tensor, " d"],
    eps: float,
) -> tuple[Heads, Heads, Heads]:
    """Splits and rotates, with a norm of each query and key head before the rotation (Qwen3); keeps the projection's
    output."""
    return _SplitNormedRotated.apply(fused, cos, sin, query_weight, key_weight, eps)


class _SplitNormedRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *scales = _split_normed(fused, *given)
        *tensors, _ = given
        ctx.save_for_backward(fused, *tensors, *scales)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_fused, *of_weights = _normed_back(gradients, ctx.saved_tensors)
        needed = zip(of_weights, ctx.needs_input_grad[3:5], strict=True)
        return of_fused, None, None, *(weight if asked else None for weight, asked in needed), None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates in float32; cos and sin [T, 1, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _turn_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of ``_turn``'s input: cos and sin may be scaled, so it is not the rotation by the opposite angles."""
    first, second = (gradient * sin).chunk(2, dim=-1)
    return gradient * cos + torch.cat([second, -first], dim=-1)


@compiled
def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turn(x.float(), cos[:, None], sin[:, None]).to(x.dtype)


@compiled
def _rotated_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turn_back(gradient.float(), cos[:, None], sin[:, None]).to(gradient.dtype)


@compiled
def _split(fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide, cos, sin = fused[:, :, :-1].float(), cos[:, None, None], sin[:, None, None]
    turned = _turn(wide, cos, sin).to(fused.dtype)
    query, key = turned[:, :, :-1].flatten(1, 2), turned[:, :, -1].contiguous()
    return query, key, fused[:, :, -1].clone(memory_format=torch.contiguous_format)


@compiled
def _joined_back(of_query: Tensor, of_key: Tensor, of_value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat([of_query.unflatten(1, (of_key.size(1), -1)), of_key[:, :, None]], dim=2)
    back = _turn_back(turned.float(), cos[:, None, None], sin[:, None, None]).to(of_query.dtype)
    return torch.cat([back, of_value[:, :, None]], dim=2)


@compiled
def _split_normed(
    fused: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> tuple[Tensor, ...]:
    # Rounded to the model's dtype before the rotation, as the engine's norms are.
    query, query_scale = normed(fused[:, :, :-2].flatten(1, 2), query_weight, eps)
    key, key_scale = normed(fused[:, :, -2], key_weight, eps)
    cos, sin = cos[:, None], sin[:, None]
    turned = (_turn(one.float(), cos, sin).to(fused.dtype) for one in (query, key))
    value = fused[:, :, -1].clone(memory_format=torch.contiguous_format)
    return *turned, value, query_scale, key_scale


@compiled
def _normed_back(gradients: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projection and of both weights."""
    of_query, of_key, of_value = gradients
    fused, cos, sin, query_weight, key_weight, query_scale, key_scale = saved
    angles = cos[:, None], sin[:, None]
    query, key = fused[:, :, :-2].flatten(1, 2), fused[:, :, -2]
    turned = _turn_back(of_query.float(), *angles)
    of_query, of_query_weight = norm_gradients(turned, query, query_weight, query_scale)
    of_key, of_key_weight = norm_gradients(_turn_back(of_key.float(), *angles), key, key_weight, key_scale)
    heads = of_query.unflatten(1, (key.size(1), -1))
    of_fused = torch.cat([heads, of_key[:, :, None], of_value[:, :, None]], dim=2)
    return of_fused, of_query_weight, of_key_weight

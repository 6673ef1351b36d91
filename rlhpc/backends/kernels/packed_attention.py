"""Causal attention over segments of a packed batch, by fused kernels or by PyTorch's operations.

In half precision on a GPU it is fused: flash-attn, or PyTorch's variable-length kernel. All align causal attention
bottom-right: flash-attn since 2.1 (its README), and PyTorch's kernel is flash-attn's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rlhpc.backends.kernels.segments import Segments
from rlhpc.core.errors import UserError

_LARGEST_HEAD = 256  # of flash-attn's kernels


@dataclass(frozen=True)
class Scores:
    """Scores of a layer's attention: ``scale`` times the product of query and key, before the softmax."""

    scale: float
    window: int | None = None  # maximum number of keys of a query, the last one included
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)

    def __post_init__(self) -> None:
        assert self.window is None or self.window > 0, self.window


def attend_by_scores(
    query: Float[Tensor, "segments heads queries d"],
    key: Float[Tensor, "segments kv_heads keys d"],
    value: Float[Tensor, "segments kv_heads keys d"],
    visible: Bool[Tensor, "segments 1 queries keys"],
    scores: Scores,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "segments heads queries d"]:
    """Attention with softcap and sinks, in float32 at least. Memory grows with the square of the length."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kv_heads, queries = key.size(1), query.size(2)
    # The query heads of a key head are rows of one product: keys need not be repeated.
    rows = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    logits = (rows @ key.transpose(2, 3) * scores.scale).unflatten(2, (-1, queries)).flatten(1, 2)
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : key.size(2)]
    return (weights.unflatten(1, (kv_heads, -1)).flatten(2, 3) @ value).unflatten(2, (-1, queries)).flatten(1, 2)


def attend_fused(
    query: Float[Tensor, "queries heads d"],
    key: Float[Tensor, "keys kv_heads d"],
    value: Float[Tensor, "keys kv_heads d"],
    segments: Segments,
    scores: Scores,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "queries heads d"]:
    """flash-attn if it is installed, else PyTorch's kernel. Raises UserError for scores that they do not compute."""
    if query.size(-1) > _LARGEST_HEAD:
        message = f"the fused kernels have no heads of more than {_LARGEST_HEAD} dimensions, the model has"
        raise UserError(f"{message} {query.size(-1)}", where="attention", remedy="set dtype to float32")
    if sinks is not None:
        return _attend_with_sinks(query, key, value, segments, scores, sinks)
    bounds = (segments.query_bounds, segments.key_bounds, segments.longest_query, segments.longest_key)
    flash = _flash_attention()
    if flash is not None:
        options = _flash_options(scores, _parameters(flash))
        output = flash(query, key, value, *bounds, softmax_scale=scores.scale, causal=True, **options)
        return output[0] if isinstance(output, tuple) else output  # FlashAttention 3's first releases add sums
    from torch.nn.attention.varlen import varlen_attn

    accepted = _parameters(varlen_attn)
    options = _varlen_options(scores, accepted)
    if query.size(1) != key.size(1):
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        else:
            key, value = _repeat_for_queries(query, key, value)
    return varlen_attn(query, key, value, *bounds, scale=scores.scale, **options)


def kernel_name(*, on_gpu: bool) -> str:
    """Name of the attention kernels: in half precision on a GPU, in any precision on a CPU."""
    if not on_gpu:
        return "torch scaled_dot_product_attention"
    flash = _flash_attention()
    if flash is None:
        return "torch varlen_attn"
    return "flash-attn 3" if flash is _hopper_attention() else "flash-attn"


def _flash_options(scores: Scores, accepted: frozenset[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if scores.window is not None:
        options["window_size"] = (scores.window - 1, 0)
    if scores.softcap is not None:
        if "softcap" not in accepted:
            raise _missing("a softcap of its attention scores", "upgrade flash-attn to 2.6 or newer")
        options["softcap"] = scores.softcap
    return options


def _varlen_options(scores: Scores, accepted: frozenset[str]) -> dict[str, Any]:
    if scores.softcap is not None:
        raise _missing("a softcap of its attention scores", "install flash-attn 2.6 or newer")
    if "window_size" in accepted:
        return {"window_size": _window(scores)}
    if scores.window is not None:
        raise _missing("a sliding window", "install flash-attn, or a PyTorch whose varlen_attn takes window_size")
    return {"is_causal": True}


def _window(scores: Scores) -> tuple[int, int]:
    """Keys before and after a query's own, -1 for all."""
    return (-1 if scores.window is None else scores.window - 1, 0)


def _missing(feature: str, remedy: str) -> UserError:
    return UserError(f"the model has {feature}, which no installed kernel computes", where="attention", remedy=remedy)


def _repeat_for_queries(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values to the number of query heads."""
    groups = query.size(1) // key.size(1)
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


@dataclass(frozen=True)
class RawKernel:
    """Forward and backward pass of an attention without sinks, whose backward pass takes any log-sums of scores.

    ``forward``: query, key, value to (output, log-sums of the scores [heads, queries]). ``backward``: gradient of the
    output, query, key, value, output and log-sums to the gradients of query, key and value.
    """

    forward: Callable[..., tuple[Tensor, Float32[Tensor, "heads queries"]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class SinkAttention(torch.autograd.Function):
    """Adds sinks to a kernel that has none; exact in both passes.

    A sink adds to the sum of exponents, so that it scales the output. With the larger sum, the kernel's own backward
    pass computes the weights that remain and, from the scaled output, the term that the softmax subtracts.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: RawKernel) -> Tensor:
        output, sums = kernel.forward(query, key, value)
        assert sums.shape == (query.size(1), query.size(0)), sums.shape
        total = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        output = (output * (sums - total).exp().T[..., None]).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, total)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, total = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_inputs = ctx.kernel.backward(gradient, query, key, value, output, total)
        dtype = total.dtype
        weights = (sinks.to(dtype)[:, None] - total).exp()  # of the sinks, [heads, queries]
        of_sinks = -(weights * (gradient.to(dtype) * output.to(dtype)).sum(-1).T).sum(1)
        return *of_inputs, of_sinks.to(sinks.dtype), None


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores, sinks: Tensor
) -> Tensor:
    """PyTorch's kernel, as flash-attn's packages differ in their functions for the backward pass."""
    if scores.softcap is not None:
        raise _missing("a softcap of its attention scores beside sinks", "train it with dtype float32")
    return SinkAttention.apply(query, key, value, sinks, _torch_kernel(segments, scores))


def _torch_kernel(segments: Segments, scores: Scores) -> RawKernel:
    """The operators of torch.nn.attention.varlen; here they give log-sums and take others."""
    bounds = (segments.query_bounds, segments.key_bounds, segments.longest_query, segments.longest_key)
    # A window is causal by itself, as it ends with the query's own key.
    rest: tuple[Any, ...] = (0.0, scores.window is None)  # dropout, causal
    left, right = _window(scores)
    options = {"scale": scores.scale, "window_size_left": left, "window_size_right": right}

    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (query, key, value, *bounds, *rest)
        return torch.ops.aten._flash_attention_forward(*inputs, return_debug_mask=False, **options)[:2]

    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (gradient, query, key, value, output, sums)
        generator = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        return torch.ops.aten._flash_attention_backward(*inputs, *bounds, *rest, *generator, **options)

    return RawKernel(forward, backward)


@functools.cache
def _flash_attention() -> Any:
    hopper = _hopper_attention()
    if hopper is not None:
        return hopper
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _hopper_attention() -> Any:
    """FlashAttention 3, which runs on Hopper alone (its README), and is a package of its own."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def attend(
    query: Float[Tensor, "queries heads d"],
    key: Float[Tensor, "keys kv_heads d"],
    value: Float[Tensor, "keys kv_heads dv"],
    segments: Segments,
    scores: Scores,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "queries heads dv"]:
    """Attention of each segment's queries to its keys; by fused kernels for half precision on a GPU.

    ``sinks``: one more score for each head, which takes a share of the softmax and adds nothing to the output. Raises
    UserError if no installed kernel computes these scores.
    """
    fused = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    function = attend_fused if fused else _attend_padded
    # Kernels require values as long as keys: zeros appended to values append zeros to the output, and those appended to
    # queries and keys change no score.
    value_dim, dim = value.size(-1), max(key.size(-1), value.size(-1))
    query, key, value = (F.pad(x, (0, dim - x.size(-1))) if x.size(-1) < dim else x for x in (query, key, value))
    return function(query, key, value, segments, scores, sinks)[..., :value_dim]


def _attend_padded(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """PyTorch's attention, or explicit scores, one call for each bucket of segments of similar lengths."""
    grouped = query.size(1) != key.size(1)
    output = torch.zeros_like(query)
    for bucket in segments.buckets:
        q, k, v = (
            x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
            for x, rows in ((query, bucket.query_rows), (key, bucket.key_rows), (value, bucket.key_rows))
        )
        if scores.softcap is None and sinks is None:
            mask = bucket.mask(scores.window)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=grouped
            )
        else:
            attended = attend_by_scores(q, k, v, bucket.visible(scores.window), scores, sinks).to(query.dtype)
        attended = attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.cells)
        output = output.index_copy(0, bucket.queries, attended)
    return output

"""Attention core of Megatron's layers: causal, on packed sequences, with or without context parallelism."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.megatron.context import gather_visible, heads_to_tokens, tokens_to_heads
from rlhpc.backends.megatron.packed import PackedParams
from rlhpc.backends.megatron.segments import Segments


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences with grouped queries, of rotated queries and keys.

    These may be longer than values. With selective recompute of "core_attn" it keeps its inputs alone.

    ``cp_comm_type`` under context parallelism: "all_gather" gives every rank all keys and values, "a2a" all tokens of
    some heads, which the number of heads must allow.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type is AttnMaskType.causal
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        group = pg_collection.cp if pg_collection is not None else None
        self.group = group if group is not None and group.size() > 1 else None
        assert self.group is None or cp_comm_type in ("all_gather", "a2a"), cp_comm_type
        self.exchanges_heads = cp_comm_type == "a2a"

    def forward(
        self,
        query: Float[Tensor, "L heads d"],
        key: Float[Tensor, "L kv_heads d"],
        value: Float[Tensor, "L kv_heads dv"],
        attention_mask: Tensor | None = None,
        /,
        *,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> Float[Tensor, "L heads dv"]:
        if not (self.recomputes and self.training):
            return self._attend(query, key, value, packed_seq_params)
        distribute_saved = False
        attend = functools.partial(self._attend, params=packed_seq_params)
        return tensor_parallel.checkpoint(attend, distribute_saved, query, key, value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, params: PackedParams) -> Tensor:
        context, group = params.context, self.group
        if group is None:
            return attend(query, key, value, context.whole, self.scale)
        if self.exchanges_heads:
            query, key, value = tokens_to_heads(query, key, value, context, group)
            return heads_to_tokens(attend(query, key, value, context.whole, self.scale), context, group)
        key, value = gather_visible(key, value, context, group)
        return attend(query, key, value, context.chunks, self.scale)


def attend(
    query: Float[Tensor, "queries heads d"],
    key: Float[Tensor, "keys kv_heads d"],
    value: Float[Tensor, "keys kv_heads dv"],
    segments: Segments,
    scale: float,
) -> Float[Tensor, "queries heads dv"]:
    """Attention of each segment's queries to its keys; by fused kernels for half precision on a GPU."""
    fused = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    function = _attend_fused if fused else _attend_padded
    # Kernels require values as long as keys: zeros appended to values append zeros to the output.
    value_dim, missing = value.size(-1), key.size(-1) - value.size(-1)
    if missing:
        value = F.pad(value, (0, missing))
    return function(query, key, value, segments, scale)[..., :value_dim]


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """PyTorch's attention, one call for each bucket of segments of similar lengths."""
    grouped = query.size(1) != key.size(1)
    output = torch.zeros_like(query)
    for bucket in segments.buckets:
        q, k, v = (
            x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
            for x, rows in ((query, bucket.query_rows), (key, bucket.key_rows), (value, bucket.key_rows))
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=scale, enable_gqa=grouped
        )
        attended = attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.cells)
        output = output.index_copy(0, bucket.queries, attended)
    return output


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """flash-attn if it is installed, else PyTorch's variable-length kernel.

    All align causal attention bottom-right: flash-attn since 2.1 (its README), and PyTorch's kernel is flash-attn's.
    """
    bounds = (segments.query_bounds, segments.key_bounds, segments.longest_query, segments.longest_key)
    flash = _flash_attention()
    if flash is not None:
        output = flash(query, key, value, *bounds, softmax_scale=scale, causal=True)
        return output[0] if isinstance(output, tuple) else output  # FlashAttention 3's first releases add sums
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale}
    accepted = _parameters(varlen_attn)
    options.update({"is_causal": True} if "is_causal" in accepted else {"window_size": (-1, 0)})
    if query.size(1) != key.size(1):
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        else:
            key, value = _repeat_for_queries(query, key, value)
    return varlen_attn(query, key, value, *bounds, **options)


def kernel_name(*, on_gpu: bool) -> str:
    """Name of the attention kernels: in half precision on a GPU, in any precision on a CPU."""
    if not on_gpu:
        return "torch scaled_dot_product_attention"
    flash = _flash_attention()
    if flash is None:
        return "torch varlen_attn"
    return "flash-attn 3" if flash is _hopper_attention() else "flash-attn"


def _repeat_for_queries(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values to the number of query heads."""
    groups = query.size(1) // key.size(1)
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


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

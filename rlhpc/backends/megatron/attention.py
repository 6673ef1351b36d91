"""Attention of Megatron's layers on packed sequences, causal, with or without context parallelism, and its norms.

Self-attention is one step from the fused projection to rotated heads. The norm is the same in images with apex or
Transformer Engine.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from jaxtyping import Float
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.exchanges import gather_visible, heads_to_tokens, tokens_to_heads
from rlhpc.backends.kernels.packed_attention import Scores, attend
from rlhpc.backends.kernels.rms_norm import rms_norm
from rlhpc.backends.kernels.rotary import rotate, split_normed_rotated, split_rotated
from rlhpc.backends.megatron.packed import PackedParams
from rlhpc.parallel.compat import device


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
        self.scores = Scores(softmax_scale or 1.0 / math.sqrt(config.kv_channels))
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
            return attend(query, key, value, context.whole, self.scores)
        if self.exchanges_heads:
            query, key, value = tokens_to_heads(query, key, value, context, group)
            return heads_to_tokens(attend(query, key, value, context.whole, self.scores), context, group)
        key, value = gather_visible(key, value, context, group)
        return attend(query, key, value, context.chunks, self.scores)


class PackedSelfAttention(SelfAttention):
    """Megatron's attention with grouped queries, on packed sequences."""

    def forward(
        self,
        hidden_states: Float[Tensor, "T_local 1 hidden"],
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> tuple[Float[Tensor, "T_local 1 hidden"], Tensor | None]:
        query, key, value = self._heads(hidden_states, packed_seq_params)
        attended = self.core_attention(query, key, value, packed_seq_params=packed_seq_params)
        return self.linear_proj(attended.reshape(len(attended), 1, -1))

    def _heads(self, hidden_states: Tensor, params: PackedParams) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, heads / tp, d]; key and value [T, kv_heads / tp, d], at least one head."""
        if self.config.num_query_groups < self.world_size:
            # A key head's queries are on several ranks, whose projections upstream gathers (attention.py:1398).
            query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden_states))
            return rotate(query, params.cos, params.sin), rotate(key, params.cos, params.sin), value
        fused, _ = self.linear_qkv(hidden_states)
        head = self.hidden_size_per_attention_head
        fused = fused.reshape(len(fused), self.num_query_groups_per_partition, -1, head)
        if isinstance(self.q_layernorm, IdentityOp):
            return split_rotated(fused, params.cos, params.sin)
        norms = self.q_layernorm.weight, self.k_layernorm.weight, self.config.layernorm_epsilon
        return split_normed_rotated(fused, params.cos, params.sin, *norms)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019). Under sequence parallelism its gradient is summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads

    def forward(self, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        return rms_norm(x, self.weight, self.eps)

"""Attention core of Megatron's layers: causal, on packed sequences, with or without context parallelism."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from jaxtyping import Float
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.exchanges import gather_visible, heads_to_tokens, tokens_to_heads
from rlhpc.backends.kernels.packed_attention import attend
from rlhpc.backends.kernels.scores import Scores
from rlhpc.backends.megatron.packed import PackedParams


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

"""Self-attention of Megatron's layers: one step from the fused projection to rotated heads."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from rlhpc.backends.kernels.rotary import rotate, split_normed_rotated, split_rotated
from rlhpc.backends.megatron.packed import PackedParams


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

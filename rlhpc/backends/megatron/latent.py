"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), for training.

Replaces upstream's module (multi_latent_attention.py). At tp > 1 without Transformer Engine its gradients are wrong,
because that of the shared rotary key is never summed over tp; and it rotates sequence by sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.rotary import rotate
from rlhpc.backends.megatron.attention import PackedAttention, RMSNorm
from rlhpc.backends.megatron.packed import PackedParams
from rlhpc.models import LatentAttention
from rlhpc.parallel.compat import device


class ReplicatedLinear(torch.nn.Linear):
    """Linear layer replicated on tensor-parallel ranks, which sum its gradients: each has a part of the sequence."""

    def __init__(self, config: TransformerConfig, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=config.params_dtype, device=device())
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads


class LatentSelfAttention(MegatronModule):
    """Implements the ``self_attention`` of TransformerLayer."""

    def __init__(
        self,
        config: TransformerConfig,
        latent: LatentAttention,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        assert groups.tp.size() == 1 or config.sequence_parallel, "tp > 1 needs sequence parallelism here"
        self.latent, self._tp = latent, groups.tp
        self._heads = config.num_attention_heads // groups.tp.size()
        heads, hidden = config.num_attention_heads, config.hidden_size
        query_dim = latent.nope_dim + latent.rope_dim

        def column(in_features: int, out_features: int) -> ColumnParallelLinear:
            options = {"config": config, "init_method": config.init_method, "tp_group": groups.tp}
            return ColumnParallelLinear(in_features, out_features, bias=False, gather_output=False, **options)

        if latent.query_rank is None:
            self.linear_q_proj = column(hidden, heads * query_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, latent.query_rank)
            self.q_layernorm = RMSNorm(config, latent.query_rank, config.layernorm_epsilon)
            self.linear_q_up_proj = column(latent.query_rank, heads * query_dim)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent.kv_rank + latent.rope_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, config.layernorm_epsilon)
        self.linear_kv_up_proj = column(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim))
        self.core_attention = PackedAttention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            softmax_scale=config.softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=groups,
        )
        self.linear_proj = RowParallelLinear(
            heads * latent.value_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=groups.tp,
        )

    def forward(
        self,
        hidden_states: Float[Tensor, "T_local 1 hidden"],
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> tuple[Float[Tensor, "T_local 1 hidden"], None]:
        query, key, value = self._project(hidden_states, packed_seq_params)
        attended = self.core_attention(query, key, value, packed_seq_params=packed_seq_params)
        return self.linear_proj(attended.reshape(len(attended), 1, -1))

    def _project(self, x: Tensor, params: PackedParams) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key [T, heads / tp, nope + rope]; value [T, heads / tp, value_dim]."""
        latent = self.latent
        if latent.query_rank is None:
            query, _ = self.linear_q_proj(x)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x)))
        query = query.view(len(query), self._heads, -1)
        compressed, rotary_key = self.linear_kv_down_proj(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        if self.config.sequence_parallel:
            # Its backward pass is a reduce-scatter, which sums over the heads of all tensor-parallel ranks.
            rotary_key = tensor_parallel.gather_from_sequence_parallel_region(rotary_key, group=self._tp)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        key_value = key_value.view(len(query), self._heads, -1)
        key, value = key_value.split([latent.nope_dim, latent.value_dim], dim=-1)
        straight, turning = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        turning, rotary_key = self._rotate(turning, params), self._rotate(rotary_key, params)
        key = torch.cat([key, rotary_key.expand(-1, self._heads, -1)], dim=-1)
        return torch.cat([straight, turning], dim=-1), key, value

    def _rotate(self, x: Float[Tensor, "T heads rope"], params: PackedParams) -> Float[Tensor, "T heads rope"]:
        if self.latent.interleaved_rope:
            # From interleaved pairs to halves, for both query and key: their product does not change.
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, params.cos, params.sin)

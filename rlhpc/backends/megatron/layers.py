"""Our modules in Megatron's layer specs: the norm and the attention core, and the specs that plug them in."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rlhpc.backends.megatron.packed import PackedParams


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019). Under sequence parallelism its gradient is summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads

    def forward(self, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences with grouped queries, rotary embedding included.

    Rotating here, by explicit positions, needs one multiplication for the whole batch; Megatron's own way loops over
    the sequences.
    """

    def __init__(
        self, config: TransformerConfig, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        assert attn_mask_type is AttnMaskType.causal
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Float[Tensor, "T heads head_dim"],
        key: Float[Tensor, "T kv_heads head_dim"],
        value: Float[Tensor, "T kv_heads head_dim"],
        attention_mask: Tensor | None = None,
        /,
        *,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> Float[Tensor, "T heads head_dim"]:
        params = packed_seq_params
        query = rotate(query, params.cos, params.sin)
        key = rotate(key, params.cos, params.sin)
        attend = _attend_fused if query.is_cuda else _attend_padded
        return attend(query, key, value, params, self.scale)


def rotate(x: Float[Tensor, "T heads d"], cos: Float[Tensor, "T d"], sin: Float[Tensor, "T d"]) -> Tensor:
    """Rotary embedding, halves convention (Su et al. 2021; transformers' apply_rotary_pos_emb)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, params: PackedParams, scale: float) -> Tensor:
    """PyTorch's attention on a CPU, one call for each bucket of sequences of like length."""
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output = torch.zeros_like(query)
    for bucket in params.buckets:
        q, k, v = (
            x.index_select(0, bucket.rows.flatten()).view(*bucket.rows.shape, *x.shape[1:]).transpose(1, 2)
            for x in (query, key, value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        attended = attended.transpose(1, 2).reshape(-1, *query.shape[1:]).index_select(0, bucket.cells)
        output = output.index_copy(0, bucket.tokens, attended)
    return output


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, params: PackedParams, scale: float) -> Tensor:
    """flash-attn where the site has built it, PyTorch's variable-length kernel elsewhere."""
    bounds, longest = params.cu_seqlens_q, params.max_seqlen_q
    flash = _flash_attention()
    if flash is not None:
        return flash(query, key, value, bounds, bounds, longest, longest, softmax_scale=scale, causal=True)
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale}
    accepted = _parameters(varlen_attn)
    options.update({"is_causal": True} if "is_causal" in accepted else {"window_size": (-1, 0)})
    if query.size(1) != key.size(1):
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        else:
            groups = query.size(1) // key.size(1)
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)


@functools.cache
def _flash_attention() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class _Provider(LocalSpecProvider):
    """Megatron's plain PyTorch modules, with our norm and attention core."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The spec of the layers that this pipeline rank builds for one chunk."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    layer = _layer_spec(config)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=RMSNorm
    )


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    provider = _Provider()
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=PackedAttention,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(backend=provider),
            mlp_bda=get_bias_dropout_add,
        ),
    )

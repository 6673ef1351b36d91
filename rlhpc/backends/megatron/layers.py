"""Megatron's layer specs with rlhpc's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor
from torch.nn import Module

from rlhpc.backends.megatron.attention import PackedAttention
from rlhpc.backends.megatron.expert_layer import ExpertLayer
from rlhpc.backends.megatron.experts import GroupedExperts, Router
from rlhpc.backends.megatron.feed_forward import SUBMODULES, FeedForward, SharedExperts
from rlhpc.backends.megatron.latent import LatentSelfAttention
from rlhpc.backends.megatron.norm import RMSNorm
from rlhpc.backends.megatron.replay import ReplayLayer
from rlhpc.backends.megatron.self_attention import PackedSelfAttention
from rlhpc.checkpoint.formats.torch_dist import renamed_parts
from rlhpc.models import ModelShape


def block_spec(shape: ModelShape, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of the layers that this pipeline rank builds for one chunk."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [_layer_spec(shape, config, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(shape: ModelShape, config: TransformerConfig, layer: int) -> ModuleSpec:
    has_experts = shape.experts is not None and layer in shape.experts.layers
    return ModuleSpec(
        module=ReplayLayer if has_experts else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention_spec(shape, config),
            self_attn_bda=_residual_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_Experts if has_experts else FeedForward,
            mlp_bda=_residual_add,
            sharded_state_dict_keys_map=renamed_parts(shape, layer),
        ),
    )


def _attention_spec(shape: ModelShape, config: TransformerConfig) -> ModuleSpec:
    if shape.latent is not None:
        return ModuleSpec(module=LatentSelfAttention, params={"latent": shape.latent})
    provider = LocalSpecProvider()
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=PackedAttention,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


class _Experts(ExpertLayer):
    """With the modules it is built of: Megatron passes process groups to its own class alone, and warns of others in a
    ModuleSpec (transformer_layer.py:366)."""

    submodules = MoESubmodules(
        router=Router,
        experts=ModuleSpec(module=GroupedExperts),
        shared_experts=ModuleSpec(module=SharedExperts, submodules=SUBMODULES),
    )


def _residual_add(*_: Any) -> Callable[..., Tensor]:
    """Megatron's place for bias, dropout and the residual, of which only the last is there."""

    def add(output: tuple[Tensor, None], residual: Tensor, _: float) -> Tensor:
        return residual + output[0]

    return add


def numbered_layers(models: Iterable[Module]) -> Iterator[tuple[int, Module]]:
    """The transformer layers of a rank's models, by their numbers from 0 in the whole model."""
    modules = (module for model in models for module in model.modules())
    return ((module.layer_number - 1, module) for module in modules if isinstance(module, TransformerLayer))

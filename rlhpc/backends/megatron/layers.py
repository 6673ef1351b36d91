"""Megatron's layer specs with rlhpc's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch.nn import Module

from rlhpc.backends.megatron.attention import PackedAttention
from rlhpc.backends.megatron.expert_layer import ExpertLayer
from rlhpc.backends.megatron.experts import GroupedExperts, Router
from rlhpc.backends.megatron.latent import LatentSelfAttention
from rlhpc.backends.megatron.norm import RMSNorm
from rlhpc.backends.megatron.replay import ReplayLayer
from rlhpc.models import ModelShape


class _Provider(LocalSpecProvider):
    """Megatron's plain PyTorch modules, with rlhpc's norm and attention core."""

    def layer_norm(self, *_: Any, **__: Any) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


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
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_Experts if has_experts else get_mlp_module_spec_for_backend(backend=_Provider()),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(shape: ModelShape, config: TransformerConfig) -> ModuleSpec:
    if shape.latent is not None:
        return ModuleSpec(module=LatentSelfAttention, params={"latent": shape.latent})
    provider = _Provider()
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
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


class _Experts(ExpertLayer):
    """With the modules it is built of: Megatron passes process groups to its own class alone, and warns of others in a
    ModuleSpec (transformer_layer.py:366)."""

    submodules = MoESubmodules(
        router=Router,
        experts=ModuleSpec(module=GroupedExperts),
        shared_experts=ModuleSpec(
            module=SharedExpertMLP,
            submodules=MLPSubmodules(
                linear_fc1=_Provider().column_parallel_linear(), linear_fc2=_Provider().row_parallel_linear()
            ),
        ),
    )


def numbered_layers(models: Iterable[Module]) -> Iterator[tuple[int, Module]]:
    """The transformer layers of a rank's models, by their numbers from 0 in the whole model."""
    modules = (module for model in models for module in model.modules())
    return ((module.layer_number - 1, module) for module in modules if isinstance(module, TransformerLayer))

"""Megatron's layer specs with rlhpc's modules.

Feed-forward parts are SwiGLU in one step with the product after it. With router replay, tokens go to the experts that
they were routed to in the engine (R3, arXiv 2510.11370). The experts' weights are computed as always, from this model's
scores of those experts, and are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
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
from torch import Tensor

from rlhpc.backends.kernels.swiglu import swiglu_linear
from rlhpc.backends.megatron.attention import PackedAttention, PackedSelfAttention, RMSNorm
from rlhpc.backends.megatron.expert_layer import ExpertLayer
from rlhpc.backends.megatron.experts import GroupedExperts, Router
from rlhpc.backends.megatron.latent import LatentSelfAttention
from rlhpc.backends.megatron.packed import PackedParams
from rlhpc.checkpoint.formats.torch_dist import renamed_parts
from rlhpc.models import ModelShape


class ReplayLayer(TransformerLayer):
    """A layer with experts, whose tokens' routed experts, or marks of padding, come from the packed parameters.

    They are passed on as padding_mask: the only per-token tensor that Megatron passes from layer to experts, also when
    it recomputes activations of the whole layer.
    """

    def forward(self, *args: Any, packed_seq_params: PackedParams, **options: Any) -> Any:
        before, each = self.layer_number - 1, self.config.moe_layer_freq
        place = before if isinstance(each, int) else sum(each[:before])  # among the layers with experts
        options["padding_mask"] = packed_seq_params.routed.of(place)
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class SwigluRowLinear(RowParallelLinear):
    """Megatron's row-parallel linear layer with gate and up for its input."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        return swiglu_linear(input, weight)


SUBMODULES = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=SwigluRowLinear)


class _SwigluMLP(MLP):
    def forward(
        self, hidden_states: Float[Tensor, "T 1 hidden"], *_: Any, **__: Any
    ) -> tuple[Float[Tensor, "T 1 hidden"], None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gate_up)


class FeedForward(_SwigluMLP):
    """Feed-forward part of a dense layer. A class and no ModuleSpec: Megatron gives process groups to its own class
    alone, and warns of others in a ModuleSpec (transformer_layer.py:366)."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config, SUBMODULES, ffn_hidden_size=config.ffn_hidden_size)


class SharedExperts(SharedExpertMLP, _SwigluMLP):
    """Experts of every token, of which an expert layer may have some."""


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
    """Expert layer with its modules: Megatron passes process groups to its own class alone, and warns of others in a
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

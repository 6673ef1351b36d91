"""Builds Megatron's GPTModel for a shape and a layout."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.gradients import add_product
from rlhpc.backends.megatron.head import give_value_head, keep_hidden_states
from rlhpc.backends.megatron.layers import block_spec
from rlhpc.checkpoint.formats.megatron_folder import expert_options
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, MoeSection
from rlhpc.models import ModelShape
from rlhpc.parallel.compat import device, fuse_weight_gradients, hold_sent_tensors
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import padded_vocab

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype, settings: ModelSettings
) -> TransformerConfig:
    """Megatron's configuration of the model. Without Transformer Engine and apex, Megatron's own fusions are off."""
    parallel = settings.parallel
    dispatch = parallel.expert_dispatch if shape.experts else "alltoall"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        softmax_scale=shape.softmax_scale,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **_sizes(layout),
        sequence_parallel=parallel.sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights come from files. Initialization still runs, as a no-op: it marks the parameters that are sharded over
        # tp, without which the gradient norm is wrong at tp > 1.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=False,
        # Packed batches differ in length; for "allgather" they are padded to one length.
        variable_seq_lengths=layout.pp > 1 and dispatch == "alltoall",
        moe_token_dispatcher_type=dispatch,
        # With interleaved stages, batched sends over gloo mix up tensors: wrong losses and no error.
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        # A receive orders the streams; synchronizing the GPU after it was for a fault of older PyTorch.
        batch_p2p_sync=False,
        cp_comm_type="a2a" if parallel.cp_method == "ulysses" else "all_gather",
        deallocate_pipeline_outputs=True,
        # Losses arrive divided by global denominators, so gradients are summed and never averaged again.
        calculate_per_token_loss=True,
        # Data parallelism gives each trained weight a float32 buffer, to which the backward pass adds its gradient.
        gradient_accumulation_fusion=settings.optimizer is not None,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        cuda_graph_scope=[],
        **(_expert_options(shape, settings.moe) if shape.experts else {}),
        **_recompute_options(settings.memory),
    )


def _sizes(layout: ParallelLayout) -> dict[str, Any]:
    """Parallel sizes by Megatron's names."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
    }


def _recompute_options(memory: MemorySection) -> dict[str, Any]:
    """Options for the activations that Megatron recomputes in the backward pass."""
    if memory.recompute == "none":
        return {}
    if memory.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(memory.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": memory.recompute_layers,
    }


def _expert_options(shape: ModelShape, section: MoeSection) -> dict[str, Any]:
    experts = shape.experts
    return {
        "num_moe_experts": experts.num_experts,
        **expert_options(shape),
        "moe_router_bias_update_rate": section.bias_update_rate,
        "moe_router_load_balancing_type": "aux_loss" if section.aux_loss else "none",
        "moe_aux_loss_coeff": section.aux_loss,
        # None: Router computes logits in the model's dtype, and the rest in float32.
        "moe_router_dtype": "fp32" if experts.float32_router(section.router_dtype) else None,
    }


def build_chunks(shape: ModelShape, layout: ParallelLayout, config: TransformerConfig) -> list[GPTModel]:
    """Builds this rank's modules, one for each virtual pipeline stage."""
    fuse_weight_gradients(add_product)
    if layout.vpp:
        hold_sent_tensors()
    chunks = []
    for stage in range(layout.vpp or 1):
        vp_stage = stage if layout.vpp else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = GPTModel(
            config,
            block_spec(shape, config, vp_stage),
            vocab_size=padded_vocab(shape.vocab_size, layout.tp),
            max_sequence_length=shape.max_positions,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # the layers rotate, by explicit positions: one multiplication
            vp_stage=vp_stage,
        )
        if last:
            give_value_head(model, config) if shape.head == "value" else keep_hidden_states(model)
        chunks.append(model.to(device()))
    return chunks


def _leave(tensor: Tensor) -> Tensor:
    return tensor

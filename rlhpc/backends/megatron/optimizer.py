"""Megatron's distributed optimizer from the config's section."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhpc.backends.megatron.adamw import AdamW
from rlhpc.config.schema import OptimizerSection
from rlhpc.parallel.compat import adopt_optimizer


def wrap_chunks(config: TransformerConfig, chunks: list[GPTModel]) -> list[torch.nn.Module]:
    """Half-precision casts around the modules, where the weights are bfloat16."""
    return [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else list(chunks)


def distribute(config: TransformerConfig, chunks: list[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Gradient buffers and their float32 reduction over the data-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=torch.cuda.is_available(),
        use_distributed_optimizer=True,
    )
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]

    # Token counts are dropped: losses arrive divided already, by denominators over the whole batch.
    def finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **options: object) -> None:
        finalize_model_grads(model, None, **options)

    config.finalize_model_grads_func = finalize
    config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def build_optimizer(
    section: OptimizerSection, config: TransformerConfig, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """AdamW with float32 master weights, its state cut over the data-parallel ranks."""
    adopt_optimizer(AdamW)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.learning_rate,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.epsilon,
            clip_grad=section.clip_gradient,
            use_distributed_optimizer=True,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss if config.bf16 else None
    return optimizer


def set_rate(optimizer: MegatronOptimizer, rate: float, weight_decay: float) -> None:
    """Learning rate and weight decay of every group. Megatron's wd_mult (0 for vectors) has no effect by itself."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)

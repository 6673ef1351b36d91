"""What vLLM is asked for at its start, from the configuration and the model's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.config.schema import RolloutSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape

GIB = 1 << 30
CPU_WORKER, GPU_WORKER = "rlhpc.rollout.vllm_cpu.Worker", "rlhpc.rollout.vllm_gpu.Worker"


def engine_arguments(
    model_path: Path,
    shape: ModelShape,
    section: RolloutSection,
    dtype: str,
    max_model_len: int,
    *,
    on_gpu: bool,
    world_size: int,
) -> dict[str, Any]:
    """What vLLM is asked for. No weights are read: they come from the trainer."""
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "load_format": "dummy",
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "tensor_parallel_size": section.tp,
        "enable_expert_parallel": section.expert_parallel and shape.experts is not None,
        "enable_prefix_caching": section.prefix_caching,
        "enable_chunked_prefill": section.chunked_prefill,
        "logprobs_mode": "processed_logprobs",  # of logits / temperature
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is ours to say, not the model folder's
        "disable_log_stats": True,
        "seed": 0,
        **_shape_arguments(model_path, shape, on_gpu),
    }
    if world_size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if not section.chunked_prefill:
        arguments["max_num_batched_tokens"] = max(8192, max_model_len)
    if on_gpu:
        arguments |= {
            "enable_sleep_mode": True,
            "enforce_eager": not section.cuda_graphs,
            "gpu_memory_utilization": section.gpu_memory_utilization,
            "worker_cls": GPU_WORKER,
        }
    else:
        # Compiling takes half a minute at every start and would keep the packed weights of before a weight sync.
        arguments |= {"enforce_eager": True, "worker_cls": CPU_WORKER}
    if section.kv_cache_gib is not None or not on_gpu:
        arguments["kv_cache_memory_bytes"] = int((section.kv_cache_gib or 1.0) * GIB)
    return arguments


def _shape_arguments(model_path: Path, shape: ModelShape, on_gpu: bool) -> dict[str, Any]:
    """What vLLM has to be told of models with experts and latent attention."""
    arguments: dict[str, Any] = {}
    if shape.experts and shape.experts.bias:
        # transformers 5 does not write these two; without them vLLM takes softmax for sigmoid, and no bias.
        arguments["hf_overrides"] = {"scoring_func": shape.experts.score, "topk_method": "noaux_tc"}
    if shape.experts and on_gpu:
        arguments["moe_backend"] = "triton"  # keeps weights as they were loaded; others reorder them for their kernels
    if shape.latent and not shape.latent.interleaved_rope:
        raise UserError(
            "rope_interleave = False is not supported by vLLM, which would rotate other dimensions",
            where=f"{model_path}/config.json",
            remedy="take a model with interleaved rotary dimensions, as DeepSeek publishes them",
        )
    if shape.latent and not on_gpu:
        # The CPU build's own kernel rotates them wrongly in float32: log-probs are off by up to 1.6.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return arguments


def route_arguments(section: RolloutSection) -> dict[str, Any]:
    """What makes vLLM return routed experts on a GPU."""
    from vllm import EngineArgs

    known = EngineArgs.__dataclass_fields__
    where, remedy = "actor.moe.router_replay", "set it to false"
    if "enable_return_routed_experts" not in known:
        raise UserError("this version of vLLM does not return routed experts", where=where, remedy=remedy)
    if section.tp > 1:
        raise UserError(
            f"on a GPU vLLM returns routed experts on an engine's first rank alone, and rollout.tp is {section.tp}",
            where=where,
            remedy=f"{remedy}, or rollout.tp to 1",
        )
    arguments = {"enable_return_routed_experts": True}
    if "aux_output_config" not in known:
        # Before it had that, vLLM mixed up routed experts of concurrent steps.
        arguments["async_scheduling"] = False
    return arguments

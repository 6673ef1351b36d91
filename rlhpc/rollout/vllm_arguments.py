"""vLLM's engine arguments, from the configuration and the model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.rollout import GRAPH_STRIDE, RolloutSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape

GIB = 1 << 30
CPU_WORKER, GPU_WORKER = "rlhpc.rollout.vllm_cpu.EngineCpuWorker", "rlhpc.rollout.vllm_gpu.EngineGpuWorker"
_GRAPH_SEQUENCES = 512  # vLLM's CUDA graphs reach no further by default (config/vllm.py, _set_cudagraph_sizes)


@dataclass(frozen=True)
class ServedModel:
    """A model as an engine serves it; ``end_tokens`` end a response and are part of it."""

    path: Path
    shape: ModelShape
    dtype: str
    max_model_len: int  # tokens of prompt and response together
    end_tokens: tuple[int, ...] = ()


def engine_arguments(model: ServedModel, section: RolloutSection, *, on_gpu: bool, launched: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine. It reads no weights: they come from the trainer. ``launched``: it takes its rank and
    GPU from the environment."""
    arguments: dict[str, Any] = {
        "model": str(model.path),
        "load_format": "dummy",
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": section.sequences,
        "tensor_parallel_size": section.tp,
        "enable_expert_parallel": section.expert_parallel and model.shape.experts is not None,
        "enable_prefix_caching": section.prefix_caching,
        "enable_chunked_prefill": section.chunked_prefill,
        "logprobs_mode": "processed_logprobs",  # of logits / temperature
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # ignore the model folder's sampling parameters
        "disable_log_stats": True,
        "seed": 0,
        **_shape_arguments(model.path, model.shape, on_gpu=on_gpu),
    }
    if launched:
        arguments["distributed_executor_backend"] = "external_launcher"
    if not section.chunked_prefill:
        arguments["max_num_batched_tokens"] = max(8192, model.max_model_len)
    if on_gpu:
        arguments |= {
            "enable_sleep_mode": True,
            "enforce_eager": not section.cuda_graphs,
            "gpu_memory_utilization": section.gpu_memory_utilization,
            "worker_cls": GPU_WORKER,
        }
        if section.cuda_graphs and section.sequences > _GRAPH_SEQUENCES:
            most = -(-section.sequences // GRAPH_STRIDE) * GRAPH_STRIDE
            arguments["compilation_config"] = {"max_cudagraph_capture_size": most}
    else:
        # Compilation takes half a minute per start and would retain the packed weights from before a weight sync.
        arguments |= {"enforce_eager": True, "worker_cls": CPU_WORKER}
    if section.kv_cache_gib is not None or not on_gpu:
        arguments["kv_cache_memory_bytes"] = int((section.kv_cache_gib or 1.0) * GIB)
    return arguments


def _shape_arguments(model_path: Path, shape: ModelShape, *, on_gpu: bool) -> dict[str, Any]:
    """Further arguments for models with experts and latent attention."""
    arguments: dict[str, Any] = {}
    if shape.experts and shape.experts.bias:
        # transformers 5 does not write these two; without them vLLM uses softmax in place of sigmoid, and no bias.
        arguments["hf_overrides"] = {"scoring_func": shape.experts.score, "topk_method": "noaux_tc"}
    if shape.experts and on_gpu:
        arguments["moe_backend"] = "triton"  # other backends reorder the weights for their kernels
    if shape.latent and not shape.latent.interleaved_rope:
        raise UserError(
            "vLLM does not support rope_interleave = False: it would rotate other dimensions",
            where=f"{model_path}/config.json",
            remedy="use a model with interleaved rotary dimensions, as DeepSeek publishes them",
        )
    if shape.latent and not on_gpu:
        # The CPU build's kernel rotates these wrongly in float32: log-probs are off by up to 1.6.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return arguments


def route_arguments(section: RolloutSection) -> dict[str, Any]:
    """Arguments that make vLLM return routed experts on a GPU."""
    from vllm import EngineArgs

    known = EngineArgs.__dataclass_fields__
    where, remedy = "actor.moe.router_replay", "set it to false"
    if "enable_return_routed_experts" not in known:
        raise UserError("this version of vLLM does not return routed experts", where=where, remedy=remedy)
    if section.tp > 1:
        raise UserError(
            f"on a GPU vLLM returns routed experts only on an engine's first rank, and rollout.tp is {section.tp}",
            where=where,
            remedy=f"{remedy}, or rollout.tp to 1",
        )
    arguments: dict[str, Any] = {"enable_return_routed_experts": True}
    if "aux_output_config" not in known:
        # Versions without that option mix up routed experts of concurrent steps.
        arguments["async_scheduling"] = False
    return arguments

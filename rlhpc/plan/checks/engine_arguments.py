"""Checks further arguments of vLLM's engine (``rollout.engine``) by its EngineArgs, without importing vLLM."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError, did_you_mean

# The key that sets a field.
_KEYS: Mapping[str, str] = {
    "model": "model.path",
    "hf_config_path": "model.path",
    "hf_overrides": "model.path",
    "revision": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tp",
    "enable_expert_parallel": "rollout.expert_parallel",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enable_chunked_prefill": "rollout.chunked_prefill",
    "enforce_eager": "rollout.cuda_graphs and rollout.compile",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "num_gpu_blocks_override": "rollout.kv_cache_gib",
    "seed": "seed",
    "speculative_config": "rollout.speculative.method and rollout.speculative.tokens",
    "spec_method": "rollout.speculative.method",
    "spec_model": "rollout.speculative.model",
    "spec_tokens": "rollout.speculative.tokens",
    "enable_return_routed_experts": "actor.moe.router_replay",
    "aux_output_config": "actor.moe.router_replay",
    "generation_config": "rollout.temperature and rollout.top_p",
    "override_generation_config": "rollout.temperature and rollout.top_p",
}
# Why an engine of a run has one value of a field only.
_WEIGHTS = "the trainer writes the weights, in model.dtype, where the engine loads them"
_RANKS = "an engine is rollout.tp ranks, which the launcher starts"
_TOKENS = "requests and responses are tokens"
_SAMPLED = "training needs the log-probs of the distribution that tokens are drawn from"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("load_format", "model_weights", "model_loader_extra_config", "weight_transfer_config", "hf_token"),
            *("download_dir", "quantization", "quantization_config", "enable_lora", "moe_backend", "model_impl"),
            *("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size", "offload_params"),
            *("offload_num_in_group", "offload_prefetch_step", "worker_cls", "worker_extension_cls"),
            *("enable_sleep_mode", "sleep_preserve_parameter_names", "enable_eplb", "eplb_config"),
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        (
            *("distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank"),
            *("prefill_context_parallel_size", "decode_context_parallel_size", "nnodes", "node_rank", "master_addr"),
            *("master_port", "device_ids"),
        ),
        _RANKS,
    ),
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer", "tokenizer_mode", "tokenizer_revision"), _TOKENS),
    **dict.fromkeys(("logprobs_mode", "logits_processors", "return_sampling_mask", "watermark_config"), _SAMPLED),
    "disable_log_stats": "the toolkit reads the scheduler's statistics itself",
}


def engine_faults(config: RunConfig) -> Iterator[UserError]:
    """Arguments that other keys set, that the toolkit must set, or that the installed vLLM does not have."""
    given = config.rollout.engine
    known = engine_fields() if given and not config.slurm.other_python else None
    for name in given:
        where = f"rollout.engine.{name}"
        if name in _KEYS:
            yield UserError("set by another key", where=where, remedy=f"set {_KEYS[name]}")
        elif name in _REASONS:
            yield UserError(_REASONS[name], where=where, remedy="leave it out")
        elif known is not None and name not in known:
            open_ones = known - _KEYS.keys() - _REASONS.keys()
            what = "no field of EngineArgs of the installed vLLM"
            yield UserError(what, where=where, remedy=did_you_mean(name, open_ones))


@cache
def engine_fields() -> frozenset[str] | None:
    """Names of the fields of EngineArgs in the installed vLLM, from its source; None where it is not installed."""
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(package.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    names = [
        field.target.id
        for body in bodies
        for field in body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    return frozenset(name for name in names if not name.startswith("_")) or None

"""What rlhpc uses of vLLM on a GPU: imports and calls read from its sources, and the attributes of vLLM's objects."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping

from tests.tiers.imports import ROOT

FILES = (
    "vllm_arguments",
    "vllm_engine",
    "vllm_gpu",
    "vllm_requests",
    "vllm_statistics",
    "vllm_weights",
    "token_seeds",
    "vllm_details",
    "kept_tokens",
)
# What is read of vLLM's objects, by class.
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.engine.llm_engine:LLMEngine": (
        "from_engine_args",
        "add_request",
        "abort_request",
        "step",
        "has_unfinished_requests",
        "get_num_unfinished_requests",
        "reset_prefix_cache",
        "sleep",
        "wake_up",
        "collective_rpc",
        "apply_model",
        "engine_core",
        "output_processor",
        "model_executor",
        "model_config",
    ),
    "vllm.v1.engine.core_client:InprocClient": ("engine_core",),
    "vllm.v1.engine.core:EngineCore": ("scheduler", "batch_queue"),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "requests",
        "running",
        "waiting",
        "set_pause_state",
        "kv_cache_manager",
        "get_request_counts",
    ),
    "vllm.v1.sample.sampler:Sampler": ("topk_topp_sampler",),
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler": ("forward", "forward_native", "forward_cuda"),
    "vllm.v1.core.sched.interface:PauseState": ("PAUSED_ALL", "UNPAUSED"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "usage",
        "log_stats",
        "prefix_cache_stats",
        "make_prefix_cache_stats",
    ),
    "vllm.v1.metrics.stats:PrefixCacheStats": ("queries", "hits"),
    "vllm.v1.request:Request": (
        "request_id",
        "num_preemptions",
        "num_computed_tokens",
        "cache_salt",
        "block_hashes",
        "update_block_hashes",
    ),
    "vllm.v1.engine.output_processor:OutputProcessor": ("request_states",),
    "vllm.v1.engine.output_processor:RequestState": (
        "request_id",
        "external_req_id",
        "detokenizer",
        "logprobs_processor",
        "prompt_token_ids",
    ),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": ("output_token_ids",),
    "vllm.v1.engine.logprobs:LogprobsProcessor": ("logprobs",),
    "vllm.logprobs:FlatLogprobs": ("logprobs",),
    "vllm.outputs:RequestOutput": ("request_id", "outputs", "prompt_token_ids"),
    "vllm.outputs:CompletionOutput": ("token_ids", "logprobs", "finish_reason", "stop_reason", "routed_experts"),
    "vllm.v1.executor.abstract:Executor": ("shutdown", "collective_rpc"),
    "vllm.v1.worker.gpu_worker:Worker": (
        "execute_model",
        "sample_tokens",
        "sleep",
        "wake_up",
        "model_runner",
        "use_v2_model_runner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("input_batch", "requests", "sample_tokens"),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("generators", "req_ids", "num_tokens_no_spec"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("sampling_params", "generator"),
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention": (
        "kv_b_proj",
        "W_UV",
        "W_UK_T",
        "process_weights_after_loading",
    ),
}
# What is passed by name.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "vllm.distributed.parallel_state:init_model_parallel_group": ("use_message_queue_broadcaster",),
    "vllm.v1.engine.llm_engine:LLMEngine.from_engine_args": ("usage_context",),
    "vllm.inputs:tokens_input": ("cache_salt",),
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": ("reset_running_requests",),
    "vllm.v1.engine.llm_engine:LLMEngine.sleep": ("level",),
    "vllm.v1.engine.llm_engine:LLMEngine.wake_up": ("tags",),
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": ("args",),
    # V2 samples by these two, V1 by generators that rlhpc reseeds.
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample": ("seed", "pos"),
}


def imports() -> list[tuple[str, str]]:
    """(module, name) of everything that the files import from vLLM, wherever in a file."""
    return sorted({found for file in FILES for found in _imports(_tree(file))})


def engine_accesses() -> set[str]:
    """Names that ``VllmEngine`` reads of vLLM's engine: the table above has to have them."""
    tree = _tree("vllm_engine")
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_engine(node.value)}


def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / "rlhpc" / "rollout" / f"{file}.py").read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)


def _is_engine(node: ast.expr) -> bool:
    return ast.unparse(node) == "self._engine"


def resolve(place: str) -> object:
    """The object of "module:Name.name"."""
    module, _, path = place.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def members(cls: type) -> set[str]:
    """Attributes of a class and of its instances: those it defines, annotates, assigns, or registers by name."""
    found = set(dir(cls))
    for base in cls.__mro__[:-1]:
        found |= set(vars(base).get("__annotations__", {}))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
            elif isinstance(node, ast.Call):  # replace_parameter(self, "W_UV", …)
                found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found

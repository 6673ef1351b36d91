"""vLLM's engine arguments, from the configuration and the model's shape."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhpc.config.rollout import GRAPH_STRIDE, GUESSERS, RolloutSection, SpeculativeSection
from rlhpc.core import env
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.inputs import read_json_object
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.rollout.vllm_rope import fixed_overrides, rope_overrides

GIB = 1 << 30
CPU_WORKER, GPU_WORKER = "rlhpc.rollout.vllm_cpu.EngineCpuWorker", "rlhpc.rollout.vllm_gpu.EngineGpuWorker"
# Environment variables of vLLM, unless the user sets them.
DEFAULTS = {
    env.VLLM_NO_USAGE_STATS: "1",
    env.DO_NOT_TRACK: "1",
    env.VLLM_LOGGING_LEVEL: "ERROR",
    # Requests with seeds are sampled without FlashInfer (v1/worker/gpu/sample/sampler.py, use_flashinfer), but vLLM
    # would import it at the start, also where it is not installed.
    env.VLLM_USE_FLASHINFER_SAMPLER: "0",
}
# Fields by the name of a router's bias: of DeepSeek-V3 (vLLM's deepseek_v2.py:327) and MiniMax-M2 (minimax_m2.py:86).
_BIASED_ROUTERS: dict[str, dict[str, Any]] = {
    ".gate.e_score_correction_bias": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ".block_sparse_moe.e_score_correction_bias": {"scoring_func": "sigmoid", "use_routing_bias": True},
}
_FIXED_EPSILON = {"GptOssForCausalLM": 1e-5, "OlmoeForCausalLM": 1e-5}  # vLLM's gpt_oss.py:449, olmoe.py:239
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # transformers' defaults (modeling_rope_utils.py)
_COMPILERS = ("g++", "clang++")
_GRAPH_SEQUENCES = 512  # vLLM's CUDA graphs reach no further by default (config/vllm.py, _set_cudagraph_sizes)


@dataclass(frozen=True)
class ServedModel:
    """A model as an engine serves it; ``end_tokens`` end a response and are part of it."""

    path: Path
    shape: ModelDescription
    dtype: str
    max_model_len: int  # tokens of prompt and response together
    end_tokens: tuple[int, ...] = ()
    trust_remote_code: bool = False
    reads_text: bool = False  # requests have stop texts, bad words or forms
    rope_tokens: int | None = None  # at which dynamic RoPE is fixed


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
        "skip_tokenizer_init": not model.reads_text,
        "generation_config": "vllm",  # ignore the model folder's sampling parameters
        "disable_log_stats": True,
        "seed": 0,
        "trust_remote_code": model.trust_remote_code,
        **_shape_arguments(model, on_gpu=on_gpu),
    }
    if launched:
        arguments["distributed_executor_backend"] = "external_launcher"
    if not section.chunked_prefill:
        arguments["max_num_batched_tokens"] = max(8192, model.max_model_len)
    if on_gpu:
        arguments |= {
            "enable_sleep_mode": True,
            "enforce_eager": not (section.cuda_graphs or section.compile),
            "gpu_memory_utilization": section.gpu_memory_utilization,
            "worker_cls": GPU_WORKER,
        }
        if section.cuda_graphs and section.sequences > _GRAPH_SEQUENCES:
            most = -(-section.sequences // GRAPH_STRIDE) * GRAPH_STRIDE
            arguments["compilation_config"] = {"max_cudagraph_capture_size": most}
        if section.compile and not section.cuda_graphs:
            arguments["compilation_config"] = {"cudagraph_mode": "NONE"}
    else:
        arguments |= {"enforce_eager": not section.compile, "worker_cls": CPU_WORKER}
    if section.speculative is not None:
        arguments["speculative_config"] = _speculative(section.speculative, on_gpu=on_gpu)
        if section.speculative.by_network:
            # Else vLLM schedules a step before it knows how many of the last one's guesses are right.
            arguments["async_scheduling"] = False
    if section.kv_cache_gib is not None or not on_gpu:
        arguments["kv_cache_memory_bytes"] = int((section.kv_cache_gib or 1.0) * GIB)
    merged = arguments | {name: _merged(name, arguments.get(name), value) for name, value in section.engine.items()}
    fields = merged.get("hf_overrides")
    if section.speculative is not None and section.speculative.method == "mtp" and isinstance(fields, Mapping):
        # vLLM keeps fields from the layers that guess (config/speculative.py, compose_draft_hf_overrides).
        merged["hf_overrides"] = partial(_with_fields, fields)
    return merged


def _with_fields(fields: Mapping[str, Any], config: Any) -> Any:
    """A model's configuration with other fields, as vLLM's own change of it."""
    config.update(fields)
    return config


def _speculative(section: SpeculativeSection, *, on_gpu: bool) -> dict[str, Any]:
    """vLLM's SpeculativeConfig."""
    given: dict[str, Any] = {"method": section.method, "num_speculative_tokens": section.tokens}
    if section.method == "ngram":
        given |= {"prompt_lookup_min": section.min_match, "prompt_lookup_max": section.max_match}
    if section.model is not None:
        given["model"] = str(section.model)
    if section.method in ("eagle", "eagle3") and on_gpu:
        # The files tell vLLM which tables the head shares with the policy; on a CPU our loader does.
        given["draft_load_config"] = {"load_format": "safetensors"}
    return given | section.arguments


def prepare_speculation(section: SpeculativeSection) -> None:
    """Checks and prepares this process for an engine that guesses tokens, before vLLM is imported. Raises UserError."""
    package = GUESSERS.get(section.method)
    if package is not None and find_spec(package) is None:
        raise UserError(
            f"{section.method} needs the package {package}, which this Python does not have",
            where="rollout.speculative.method",
            remedy="install it, or choose another method",
        )
    # vLLM's V2 runner draws a number of its own for each guess: other tokens than without guesses.
    os.environ[env.VLLM_USE_V2_MODEL_RUNNER] = "0"
    # With more threads the search takes ten times as long (36 and 209 us).
    os.environ.setdefault(env.NUMBA_NUM_THREADS, "1")


def check_compilation(environ: Mapping[str, str]) -> None:
    """Raises UserError if this process cannot compile an engine's model, which vLLM would find out minutes later, or
    not say. ``environ``: its environment variables."""
    where, off = "rollout.compile", environ.get(env.TORCHDYNAMO_DISABLE)
    if off == "1":
        remedy = f"set {env.TORCHDYNAMO_DISABLE}=0, or rollout.compile to false"
        raise UserError(f"{env.TORCHDYNAMO_DISABLE}=1 forbids to compile", where=where, remedy=remedy)
    named = environ.get(env.CXX)
    if not any(shutil.which(name, path=environ.get(env.PATH)) for name in ([named] if named else _COMPILERS)):
        what = f"{env.CXX}={named} is not a program" if named else f"no compiler ({' or '.join(_COMPILERS)}) in PATH"
        remedy = "load a module with one (slurm.modules), or set rollout.compile to false"
        raise UserError(what, where=where, remedy=remedy)


def check_fields(arguments: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UserError for an argument that this node's vLLM does not know. ``known``: fields of its EngineArgs."""
    for name in sorted(arguments.keys() - set(known)):
        raise UserError(
            "no field of EngineArgs of the vLLM on this node",
            where=f"rollout.engine.{name}",
            remedy=did_you_mean(name, known),
        )


def _merged(name: str, ours: Any, theirs: Any) -> Any:
    """An argument of the user's, with what the toolkit sets inside it."""
    if not isinstance(ours, Mapping):
        return theirs
    where = f"rollout.engine.{name}"
    if not isinstance(theirs, Mapping):
        raise UserError(f"{theirs!r}", where=where, remedy="give its fields by name: the toolkit sets others")
    if both := sorted(ours.keys() & theirs.keys()):
        raise UserError(f"the toolkit sets it to {ours[both[0]]}", where=f"{where}.{both[0]}", remedy="leave it out")
    return {**ours, **theirs}


def _shape_arguments(model: ServedModel, *, on_gpu: bool) -> dict[str, Any]:
    """Further arguments for models with experts, latent attention, and RoPE of their own."""
    arguments: dict[str, Any] = {}
    shape = model.shape
    if overrides := _table_overrides(model) if isinstance(shape, ModelShape) else _overrides(model):
        arguments["hf_overrides"] = overrides
    if shape.experts and on_gpu:
        arguments["moe_backend"] = "triton"  # other backends reorder the weights for their kernels
    if shape.latent and not shape.latent.interleaved_rope:
        raise UserError(
            "vLLM does not support rope_interleave = False: it would rotate other dimensions",
            where=f"{model.path}/config.json",
            remedy="use a model with interleaved rotary dimensions, as DeepSeek publishes them",
        )
    if shape.latent and not on_gpu:
        # The CPU build's kernel rotates these wrongly in float32: log-probs are off by up to 1.6.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return arguments


def _table_overrides(model: ServedModel) -> dict[str, Any]:
    """Fields that vLLM reads and transformers 5 does not write, and those of RoPE that a run changes."""
    found = {} if model.rope_tokens is None else fixed_overrides(_fields(model.path), model.rope_tokens)
    experts = model.shape.experts
    if experts is None or not experts.bias:
        return found
    # Without these two vLLM uses softmax in place of sigmoid, and no bias.
    return {**found, "scoring_func": experts.score, "topk_method": "noaux_tc"}


def _fields(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / "config.json", remedy="restore the file")


def _overrides(model: ServedModel) -> dict[str, Any]:
    """The same for a model of any architecture, as its weights and fields show."""
    shape, fields = model.shape, _fields(model.path)
    _check_epsilon(model.path, shape.architecture, fields)
    found = rope_overrides(fields, shape, model.max_model_len)
    if model.rope_tokens is not None:
        found |= fixed_overrides(fields, model.rope_tokens)
    for suffix, own in _BIASED_ROUTERS.items():
        if any(tensor.name.endswith(suffix) for tensor in shape.tensors):
            found |= {name: value for name, value in own.items() if fields.get(name) is None}
    if shape.rope is not None and shape.rope.kind == "yarn":
        parameters = {**_YARN, **shape.rope.parameters, "rope_type": "yarn", "rope_theta": shape.rope.theta}
        if _lacks_yarn(fields):
            found["rope_parameters"] = parameters
    return found


def _check_epsilon(model_path: Path, architecture: str, fields: Mapping[str, Any]) -> None:
    """Raises a UserError if vLLM would silently compute norms with another epsilon."""
    given, fixed = fields.get("rms_norm_eps"), _FIXED_EPSILON.get(architecture)
    if fixed is not None and given is not None and given != fixed:
        raise UserError(
            f"rms_norm_eps = {given:g}, but vLLM computes norms of {architecture} with {fixed:g}",
            where=f"{model_path}/config.json",
            remedy="use a model as it was published",
        )


def _lacks_yarn(fields: Mapping[str, Any]) -> bool:
    """True if vLLM's gpt_oss.py:121 would miss a field that transformers has a default of."""
    given = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    return "full_attention" not in given and not _YARN.keys() <= given.keys()


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


def kept_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that make vLLM return kept tokens on a GPU; none where ``KeptRecorder`` does, with the V1 runner that
    vLLM takes for some models with experts. ``arguments``: all others of the engine."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    wanted = {"return_sampling_mask": True}
    if wanted.keys() - EngineArgs.__dataclass_fields__.keys():
        return {}
    try:  # refused for a V1 runner (config/vllm.py, _verify_sampling_replay_config); other faults are of the start
        EngineArgs(**arguments, **wanted).create_engine_config(usage_context=UsageContext.LLM_CLASS)
    except ValueError:
        return {}
    return wanted

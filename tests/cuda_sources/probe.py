"""Collects facts about one vLLM release: ``python -m tests.cuda_sources.probe FOLDER OUT.json KIND …``.

A process of its own for each release: none can import two. KIND are families of tests/helpers/tiny_models.py.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.cuda_sources import fake_platform

GIB = 1 << 30
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# vLLM's kernels have heads of 64 and more; latent attention the sizes of the published model.
_CHANGES: dict[str, dict[str, Any]] = {"dsv3": _LATENT, "qwen3": {"head_dim": 64}, "qwen3moe": {"head_dim": 64}}
_EXPERTS = ("mixtral", "qwen3moe", "dsv3")


def main(folder: Path, out: Path, kinds: Sequence[str]) -> None:
    fake_platform.install(folder)
    from tests.cuda_sources import sleeping

    facts: dict[str, Any] = {}
    facts |= _names()
    with tempfile.TemporaryDirectory() as name:
        models = {kind: _model(Path(name, kind), kind) for kind in kinds}
        _one_rank()
        configs = {kind: _engine_config(path) for kind, path in models.items()}
        facts["arguments"] = _unknown_arguments(models)
        facts["families"] = {kind: _family(models[kind], configs[kind]) for kind in kinds}
        facts["routed_experts"] = {
            kind: _attempt(_routed_experts_config, models[kind], folder) for kind in kinds if kind in _EXPERTS
        }
        facts["kept"] = {kind: _attempt(_kept, models[kind]) for kind in kinds}
        config = configs[kinds[0]]
    facts["sampling"] = _attempt(_sampling_parameters)
    facts["memory"] = _attempt(_memory_contract)
    facts["sampler"] = _attempt(_flashinfer)
    facts["sleep"] = _attempt(sleeping.worker_facts, folder, config)
    facts["executor"] = _attempt(sleeping.executor_facts)
    out.write_text(json.dumps(facts, indent=1, default=sorted), encoding="utf-8")


def _attempt(act: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or {"error": …}."""
    try:
        return act(*args)
    except Exception as error:
        import traceback

        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _names() -> dict[str, Any]:
    from tests.cuda_sources import names

    missing = []
    for module, name in names.imports():
        try:
            names.resolve(f"{module}:{name}")
        except (ImportError, AttributeError):
            with contextlib.suppress(ImportError):
                __import__(f"{module}.{name}")  # a submodule
                continue
            missing.append(f"{module}:{name}")
    attributes = {}
    for place, wanted in names.ATTRIBUTES.items():
        found = _attempt(lambda place=place: names.members(names.resolve(place)))
        lost = found["error"] if isinstance(found, dict) else sorted(set(wanted) - found)
        if lost:
            attributes[place] = lost
    parameters = {}
    for place, wanted in names.PARAMETERS.items():
        found = _attempt(lambda place=place: set(inspect.signature(names.resolve(place)).parameters))
        lost = found["error"] if isinstance(found, dict) else sorted(set(wanted) - found)
        if lost:
            parameters[place] = lost
    return {"imports": missing, "attributes": attributes, "parameters": parameters}


def _model(folder: Path, kind: str) -> Path:
    from tests.helpers.tiny_models import make_model

    return make_model(folder, kind, vocab_size=200, max_position_embeddings=512, **_CHANGES.get(kind, {}))


def _arguments(path: Path, **section: Any) -> dict[str, Any]:
    from rlhpc.config.schema import RolloutSection
    from rlhpc.models import read_model
    from rlhpc.rollout.vllm_arguments import ServedModel, engine_arguments

    options = RolloutSection(**{"tp": 1, **section})
    model = ServedModel(path, read_model(path), "bfloat16", 512)
    return engine_arguments(model, options, on_gpu=True, launched=True)


def _unknown_arguments(models: dict[str, Path]) -> list[str]:
    """Of everything that any configuration passes what EngineArgs does not know."""
    from vllm import EngineArgs

    passed: set[str] = set()
    for path in models.values():
        for section in ({}, {"chunked_prefill": False, "kv_cache_gib": 1.0}, {"expert_parallel": True, "tp": 2}):
            passed |= _arguments(path, **section).keys()
    return sorted(passed - set(EngineArgs.__dataclass_fields__))


def _one_rank() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def _inspected_here() -> Iterator[None]:
    """vLLM would look at a model's class in a process of its own, which lacks the stubs."""
    import vllm.model_executor.models.registry as registry

    def inspected(architecture: str, model: Any) -> Any:
        return registry._ModelInfo.from_model_cls(model.load_model_cls())

    with mock.patch.object(registry, "_try_inspect_model_cls", inspected), _as_with_triton():
        yield


def _engine_config(path: Path, **changes: Any) -> Any:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    with _inspected_here():
        known = EngineArgs.__dataclass_fields__  # what is not known is a fact of its own
        arguments = {name: value for name, value in {**_arguments(path), **changes}.items() if name in known}
        return EngineArgs(**arguments).create_engine_config(usage_context=UsageContext.LLM_CLASS)


@contextlib.contextmanager
def _as_with_triton() -> Iterator[None]:
    """Every GPU machine has Triton, and the choice of the model runner asks for it."""
    import vllm.config.vllm as module

    if hasattr(module, "HAS_TRITON"):
        with mock.patch.object(module, "HAS_TRITON", True):
            yield
    else:
        yield


def _family(path: Path, config: Any) -> dict[str, Any]:
    with _as_with_triton():
        facts: dict[str, Any] = {
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "graphs": str(config.compilation_config.cudagraph_mode),
            "sleep": bool(config.model_config.enable_sleep_mode),
        }
    built = _attempt(_built, path)
    return facts | ({"model": built} if "error" in built else built)


def _built(path: Path) -> dict[str, Any]:
    """The model on the meta device: its parameters, and the tensors that are neither parameters nor buffers."""
    import torch
    from vllm.config import set_current_vllm_config

    from rlhpc.core.errors import UserError
    from rlhpc.models import read_model
    from rlhpc.rollout.vllm_weights import LiveWeights, check_parameters
    from rlhpc.sharding.engine_shards import EngineLayout

    config = _engine_config(path, enforce_eager=True)
    with set_current_vllm_config(config):
        model = _on_meta(config)
    weights = LiveWeights(model, torch.bfloat16, captured=False)
    refused = ""
    try:
        check_parameters(weights.shapes, read_model(path), EngineLayout(1))
    except UserError as error:
        refused = str(error)
    written = sorted(weights.shapes.keys() - weights.open().keys())
    return {"refused": refused, "never written": written, "plain": sorted(plain_tensors(model))}


def _on_meta(config: Any) -> Any:
    import torch
    from vllm.distributed import destroy_model_parallel, parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1, backend="gloo")
    fake_platform.models_are_built = True
    try:
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            return initialize_model(vllm_config=config)
    finally:
        fake_platform.models_are_built = False
        destroy_model_parallel()  # those of a model with experts have more groups


def plain_tensors(model: Any) -> set[str]:
    """Class and attribute of every tensor with memory of its own that a module, or an object of vLLM's that it has,
    holds as a plain attribute: made with the weights, and neither parameter nor buffer."""
    import torch

    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: set[str] = set()
    seen: set[int] = set()

    def look(owner: Any, depth: int) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                if id(value) not in known and value.numel() and value.device.type == "meta":
                    found.add(f"{type(owner).__name__}.{name}")
            elif depth and _holds_tensors(value):
                look(value, depth - 1)

    for module in model.modules():
        look(module, 3)
    return found


def _holds_tensors(value: Any) -> bool:
    """Whether it is an object of vLLM's that may have tensors: an attention back end, say, or a kernel."""
    import torch

    is_module = isinstance(value, torch.nn.Module)  # looked at anyway
    own = type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__")
    return own and not is_module and "Config" not in type(value).__name__


def _routed_experts_config(path: Path, folder: Path) -> dict[str, Any]:
    """What vLLM makes of the arguments for routed experts, and whether the runner that it takes captures them."""
    from rlhpc.config.schema import RolloutSection
    from rlhpc.rollout.vllm_arguments import route_arguments

    arguments = route_arguments(RolloutSection(tp=1))
    config = _engine_config(path, **arguments)
    with _as_with_triton():
        runner = "V2" if config.use_v2_model_runner else "V1"
    source = folder / "vllm" / "v1" / "worker" / {"V1": "gpu_model_runner.py", "V2": "gpu/model_runner.py"}[runner]
    text = source.read_text(encoding="utf-8")
    return {
        "arguments": arguments,
        "async": bool(config.scheduler_config.async_scheduling),
        "steps kept apart": "aux_output_config" in type(config).__dataclass_fields__,
        "captured": "routed_experts_capturer" in text or "aux_output_connector" in text,
    }


def _kept(path: Path) -> dict[str, Any]:
    """Whether vLLM returns kept tokens of a model, and then the places that they are read from."""
    from vllm import EngineArgs
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.output_processor import RequestState

    from rlhpc.rollout.vllm_arguments import kept_arguments
    from tests.cuda_sources import names

    with _inspected_here():
        wanted = kept_arguments(_arguments(path))
    found: dict[str, Any] = {
        "known": "return_sampling_mask" in EngineArgs.__dataclass_fields__,
        "returned": bool(wanted),
    }
    if wanted:
        from vllm.v1.outputs import SamplingMaskLists

        places = {
            "sampling_mask_chunks": RequestState,
            "sampling_mask": CompletionOutput,
            "to_nested_list": SamplingMaskLists,
        }
        found["missing"] = [name for name, owner in places.items() if name not in names.members(owner)]
    return found


def _sampling_parameters() -> dict[str, Any]:
    """``VllmEngine`` makes them from a request."""
    from rlhpc.api import Request, SamplingOptions
    from rlhpc.rollout.vllm_requests import sampling_parameters

    options = SamplingOptions(
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((3, 1.0),),
        min_tokens=2,
        stop=("a",),
        stop_token_ids=(8,),
        bad_words=("b",),
        structured_output=("regex", "a+"),
    )
    made = sampling_parameters(Request((1, 2), 2**40, 3, 0.5, options=options), [7])
    greedy = sampling_parameters(Request((1, 2), 2**40, 3, 0.0), [7], bounded=True)
    return {
        "seed": made.seed,
        "stop": list(made.stop_token_ids),
        "flat": bool(made.flat_logprobs),
        "top_k": [made.top_k, greedy.top_k],
        "temperature": [made.temperature, greedy.temperature],
        "form": made.structured_outputs.regex,
    }


def _flashinfer() -> dict[str, Any]:
    """What the sampler finds of FlashInfer, which is not installed, with vLLM's environment variables and with ours."""
    from vllm.v1.sample.ops import topk_topp_sampler

    from rlhpc.rollout.vllm_arguments import DEFAULTS

    find = topk_topp_sampler.flashinfer_sampler_supported
    try:
        defaults: Any = find()
    except Exception as error:
        defaults = type(error).__name__
    with mock.patch.dict(os.environ, DEFAULTS):
        return {"defaults": defaults, "ours": find()}


def _memory_contract() -> dict[str, Any]:
    """``request_memory`` of a device of 100 GiB at 0.9, by what is free and whether the cache's size is given."""
    from vllm.v1.worker.utils import request_memory

    answers = {}
    for free in (89, 91):
        for given in (None, 1 << 30):
            snapshot = SimpleNamespace(
                total_memory=100 * GIB, free_memory=free * GIB, device_="cuda:0", device="cuda:0"
            )
            cache = SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=given)
            try:
                answer = "ok" if request_memory(snapshot, cache) == 90 * GIB else "another amount"
            except Exception as error:
                answer = type(error).__name__
            answers[f"{free} GiB free, cache {'given' if given else 'not given'}"] = answer
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

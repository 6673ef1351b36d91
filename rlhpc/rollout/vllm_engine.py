"""vLLM in the rank's own process. The one file that calls it; what only its CPU build needs is in ``vllm_cpu``.

Serves vLLM 0.25 and 0.32 and asks for features, not for versions.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhpc.api import Completion, Request
from rlhpc.config.schema import RolloutSection
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape

GIB = 1 << 30
CPU_WORKER = "rlhpc.rollout.vllm_cpu.Worker"
_WEIGHTS, _CACHE = "weights", "kv_cache"  # vLLM's tags for what can sleep
_LAUNCHER_VARIABLES = (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE)


class VllmEngine:
    """One engine over a contiguous block of ``section.tp`` ranks; implements ``RolloutEngine``.

    All ranks of the job build their engines together, after the default process group is initialised (a rank alone
    needs none). A new engine sleeps and has no weights: ``wake_weights``, ``load_weights``, ``wake_cache``, then
    ``generate``. ``end_tokens`` end a response and are part of it. With ``routes`` each completion says to which
    experts its tokens went. Raises UserError when vLLM refuses the model or the memory it is given.
    """

    def __init__(
        self,
        model_path: Path,
        shape: ModelShape,
        section: RolloutSection,
        *,
        dtype: str,
        max_model_len: int,
        end_tokens: Sequence[int],
        routes: bool = False,
    ) -> None:
        self._end_tokens = list(end_tokens)
        self._expert_layers = list(shape.experts.layers) if routes and shape.experts else []
        self._max_model_len = max_model_len
        self._on_gpu = torch.cuda.is_available()
        self._loaded = False
        self._asleep: set[str] = set()
        arguments = engine_arguments(
            model_path, shape, section, dtype, max_model_len, on_gpu=self._on_gpu, world_size=_world_size()
        )
        if self._expert_layers and self._on_gpu:
            arguments |= _route_arguments(section)
        with _process_kept():
            self._engine = _build(arguments)
        if self._expert_layers and not self._on_gpu:
            self._engine.collective_rpc("record_routes")
        self.sleep()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. A request's tokens depend on its seed, not on its neighbours.

        With ``top_p`` < 1 the log-probs are of the distribution cut to the kept tokens.
        """
        assert not self._asleep, f"generate() while {sorted(self._asleep)} sleep"
        assert self._loaded, "generate() before load_weights()"
        from vllm.inputs import tokens_input

        for index, request in enumerate(requests):
            assert len(request.prompt) + request.max_tokens <= self._max_model_len, (
                f"{len(request.prompt)} + {request.max_tokens} tokens in a model of {self._max_model_len}"
            )
            self._engine.add_request(str(index), tokens_input(list(request.prompt)), self._parameters(request))
        completions: dict[int, Completion] = {}
        while self._engine.has_unfinished_requests():
            touch("generate")
            for output in self._engine.step():
                completions[int(output.request_id)] = _completion(output.outputs[0], self._routes(output))
        return [completions[index] for index in range(len(requests))]

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take every weight of the model, whole and by HuggingFace's name, through vLLM's own loader."""
        assert _WEIGHTS not in self._asleep, "load_weights() before wake_weights()"
        if self._on_gpu:
            self._engine.apply_model(lambda model: load_all(model, tensors))
        else:
            self._engine.collective_rpc("load_tensors", args=(tensors,))
        assert self._engine.reset_prefix_cache(), "requests still hold cached prefixes of the old weights"
        self._loaded = True

    def wake_weights(self) -> None:
        """Take back the weights' memory; nothing when they are awake."""
        self._wake(_WEIGHTS)

    def wake_cache(self) -> None:
        """Take back the KV cache; nothing when it is awake."""
        self._wake(_CACHE)

    def sleep(self) -> None:
        """Give up weights and KV cache: on a GPU both, on a CPU the memory of the cache."""
        if self._asleep:
            return
        self._engine.sleep(level=2)
        self._asleep, self._loaded = {_WEIGHTS, _CACHE}, False

    def shutdown(self) -> None:
        """Free the engine and leave vLLM's process groups; the default group stays. Collective."""
        from vllm.distributed import destroy_model_parallel

        # vLLM's own way out, also taken at exit, destroys the trainer's default group.
        finalizer = getattr(self._engine.engine_core, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        self._engine.model_executor.shutdown()
        destroy_model_parallel()
        del self._engine

    def _routes(self, output: Any) -> np.ndarray | None:
        """See ``Completion``."""
        if not self._expert_layers:
            return None
        if self._on_gpu:
            routes: np.ndarray = output.outputs[0].routed_experts[:, self._expert_layers]
            return routes if routes.dtype == np.uint8 else routes.astype(np.int16)
        tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        return self._engine.collective_rpc("routes_of", args=(output.request_id, tokens))[0]

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._engine.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def _parameters(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            ignore_eos=True,  # or the model folder would add end tokens of its own
            stop_token_ids=self._end_tokens,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nobody else holds this object
        )


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
        "max_num_seqs": section.max_running,
        "tensor_parallel_size": section.tp,
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
            "gpu_memory_utilization": section.gpu_memory_fraction,
        }
    else:
        # Compiling takes half a minute at every start and would keep the packed weights of before a push.
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


def _route_arguments(section: RolloutSection) -> dict[str, Any]:
    """What makes vLLM return routes on a GPU."""
    from vllm import EngineArgs

    known = EngineArgs.__dataclass_fields__
    where, remedy = "train.experts.replay_routes", "set it to false"
    if "enable_return_routed_experts" not in known:
        raise UserError("this version of vLLM does not return routes", where=where, remedy=remedy)
    if section.tp > 1:
        raise UserError(
            f"on a GPU vLLM returns routes on the first rank of an engine alone, and rollout.tp is {section.tp}",
            where=where,
            remedy=f"{remedy}, or rollout.tp to 1",
        )
    arguments = {"enable_return_routed_experts": True}
    if "aux_output_config" not in known:
        arguments["async_scheduling"] = False  # before it had that, vLLM mixed up routes of steps under way together
    return arguments


@torch.no_grad()
def load_all(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """vLLM's own loader of the model, and the check that no parameter was left out."""
    parameters = dict(model.named_parameters())
    loaded = model.load_weights(tensors)
    # Latent attention keeps views of a parameter's parts as parameters of their own.
    storages = {parameters[name].untyped_storage().data_ptr() for name in loaded & parameters.keys()}
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in loaded and parameter.untyped_storage().data_ptr() not in storages
    ]
    assert not missing, f"no weights for {sorted(missing)}"


def _build(arguments: dict[str, Any]) -> Any:
    """The engine core and its scheduler in this process, driven by ``add_request`` and ``step``."""
    os.environ[env.VLLM_ENABLE_V1_MULTIPROCESSING] = "0"
    for name, value in ((env.VLLM_NO_USAGE_STATS, "1"), (env.DO_NOT_TRACK, "1"), (env.VLLM_LOGGING_LEVEL, "ERROR")):
        os.environ.setdefault(name, value)
    # The external launcher reads who it is from torchrun's variables, whatever started us.
    info = RankInfo.from_environ()
    os.environ[env.RANK], os.environ[env.LOCAL_RANK] = str(info.rank), str(info.local_rank)

    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"vLLM refuses: {error}",
            where="rollout",
            remedy="correct what it names; memory is set by rollout.kv_cache_gib and rollout.gpu_memory_fraction",
        ) from error


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Keep what vLLM's start changes for the whole process and the trainer relies on.

    It reseeds every random generator, makes ``torch.set_num_threads`` a no-op (CPU) and overwrites LOCAL_WORLD_SIZE.
    """
    environ = dict(os.environ)
    python_state, numpy_state, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        for name in _LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environ)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _completion(output: Any, routes: np.ndarray | None) -> Completion:
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    completion = Completion(
        tokens=np.asarray(output.token_ids, dtype=np.int32),
        log_probs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
        truncated=output.finish_reason == "length",
        routes=routes,
    )
    assert completion.tokens.shape == completion.log_probs.shape
    return completion

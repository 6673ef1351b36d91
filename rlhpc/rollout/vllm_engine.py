"""vLLM in the rank's process: requests, sleep and weights. Code for its CPU build alone is in ``vllm_cpu``.

Supports vLLM 0.25 and 0.32; checks for features, not for versions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhpc.api import CheckWeights, Completion, Request
from rlhpc.config.rollout import RolloutSection
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import enter, touch
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape
from rlhpc.parallel.compat import keep_transformers_classes, no_engine_queue
from rlhpc.parallel.offload import release_cached
from rlhpc.plan.estimates.memory import engine_bytes
from rlhpc.rollout import vllm_memory
from rlhpc.rollout.process_state import process_state_restored
from rlhpc.rollout.vllm_arguments import (
    DEFAULTS,
    ServedModel,
    check_compilation,
    check_fields,
    engine_arguments,
    kept_arguments,
    prepare_speculation,
    route_arguments,
)
from rlhpc.rollout.vllm_details import ResponseDetails
from rlhpc.rollout.vllm_discovery import discover_layout, viewed
from rlhpc.rollout.vllm_requests import InFlight, completion_of, generated, refusals, sampling_parameters
from rlhpc.rollout.vllm_statistics import EngineStatistics, guess_metrics
from rlhpc.rollout.vllm_weights import Layout, LiveWeights, TableLayout, Weights, check_parameters
from rlhpc.sharding.engine_shards import EngineLayout, engine_shards
from rlhpc.sharding.shards import Shard, TensorSpec

_WEIGHTS, _CACHE = "weights", "kv_cache"  # vLLM's tags of what can sleep


class VllmEngine:
    """One engine over a contiguous block of ``section.tp`` ranks; implements ``RolloutEngine``.

    All ranks of the job build their engines together, after the default process group is initialized (a single rank
    needs none). A new engine sleeps and has no weights: ``wake_weights``, ``load_weights``, ``wake_cache``, then
    ``generate``. With ``routed_experts``, completions include the experts of their tokens. Raises UserError if vLLM
    rejects the model or has too little memory.
    """

    def __init__(self, model: ServedModel, section: RolloutSection, *, routed_experts: bool = False) -> None:
        enter("building the engine")
        shape = model.shape
        self._model, self._section = model, section
        expert_layers = list(shape.experts.layers) if routed_experts and shape.experts else []
        self._on_gpu = torch.cuda.is_available()
        self._loaded = False
        self._asleep: set[str] = set()
        self._shared: set[str] = set()
        layout, world_size = EngineLayout(section.tp, section.expert_parallel), _world_size()
        # Without an external launcher vLLM takes the node's first GPU, which another role may use.
        launched = world_size > 1 or (self._on_gpu and RankInfo.from_environ().local_rank > 0)
        if section.speculative is not None:
            prepare_speculation(section.speculative)
        if section.compile and not self._on_gpu:
            check_compilation(os.environ)
        arguments = engine_arguments(model, section, on_gpu=self._on_gpu, launched=launched)
        if expert_layers and self._on_gpu:
            arguments |= route_arguments(section)
        if section.returns_kept and self._on_gpu:
            arguments |= kept_arguments(arguments)
        if section.tp > 1 and self._on_gpu and spans_nodes(section.tp):
            # Its rendezvous shares GPU memory through unix sockets, and may wait forever for another node.
            os.environ.setdefault(env.VLLM_ALLREDUCE_USE_SYMM_MEM, "0")
        free, total = vllm_memory.device_memory()
        self._engine = _start(arguments, model, section, total)
        # vLLM's finalizer, run at exit or garbage collection, would destroy the default group.
        finalizer = getattr(self._engine.engine_core, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        self._statistics = EngineStatistics(self._engine.engine_core.engine_core.scheduler)
        self._in_flight = InFlight(self._engine)
        self._details = ResponseDetails(
            self._engine, expert_layers=expert_layers, kept=section.returns_kept, on_gpu=self._on_gpu
        )
        if section.speculative is not None:
            self._engine.collective_rpc("speculate", args=(section.speculative,))
        self._weights = self._find_weights(section)
        self._layout: Layout | None = None  # of a model without a table: not yet discovered
        self._buffers: dict[str, Tensor] = {}  # that contain weights
        if isinstance(shape, ModelShape):
            check_parameters(self._weights.shapes, shape, layout)
            tp_rank = dist.get_rank() % section.tp if world_size > 1 else 0
            self._layout = TableLayout(engine_shards(shape, layout, tp_rank))
        self.sleep()
        self._held = free - vllm_memory.device_memory()[0]  # bytes asleep

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. A request's tokens depend on its prompt and seed, not on its neighbors.

        Log-probs are those of the distribution that tokens are drawn from, after all its cuts.
        """
        for index, request in enumerate(requests):
            self.submit(index, request)
        completions: dict[int, Completion] = {}
        while self._engine.has_unfinished_requests():
            completions.update(self.step())
        return [completions[index] for index in range(len(requests))]

    def submit(self, key: int, request: Request) -> None:
        """See ``RolloutEngine``."""
        assert not self._asleep, f"request while {sorted(self._asleep)} sleep"
        assert self._loaded, "request before load_weights()"
        from vllm.inputs import tokens_input

        length, longest = len(request.prompt) + request.max_tokens, self._model.max_model_len
        assert length <= longest, f"request of {length} tokens, but max_model_len is {longest}"
        masked = bool(getattr(self._engine.model_config, "return_sampling_mask", False))
        parameters = sampling_parameters(request, self._model.end_tokens, bounded=masked)
        self._details.begin(key, request)
        prompt = tokens_input(list(request.prompt), cache_salt=self._in_flight.salt)
        try:
            request_id = self._engine.add_request(str(key), prompt, parameters)
        except refusals() as error:
            what, remedy = " ".join(str(error).split()), "change the option of rollout.sampling that it names"
            raise UserError(f"vLLM refuses a request: {what}", where="rollout.sampling", remedy=remedy) from error
        self._statistics.begin(key, request_id, later_turn=request.later_turn)

    def step(self) -> list[tuple[int, Completion]]:
        """See ``RolloutEngine``. Returns nothing if no request is in flight."""
        if not self._engine.has_unfinished_requests():
            return []
        touch("generate")
        outputs = self._engine.step()
        self._statistics.stepped()
        return self._completed(outputs)

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        """See ``RolloutEngine``. Its routed experts are those of ``so_far``."""
        found = self.so_far(dict.fromkeys(keys, 0))
        for key in keys:
            self._statistics.end(key)
        self._engine.abort_request([str(key) for key in keys])
        self._details.end(keys)
        if self.unfinished:
            self._in_flight.check_settled()  # workers process the abort with the next step of the others
            return found
        for _ in range(2):  # a step may be in flight on the device, and workers must process the abort
            self._engine.step()
        return found

    def settle(self) -> list[tuple[int, Completion]]:
        """See ``RolloutEngine``."""
        return self._completed(self._in_flight.drain())

    def order(self) -> list[int]:
        """See ``RolloutEngine``."""
        return self._in_flight.order()

    def so_far(self, since: Mapping[int, int]) -> dict[int, Completion]:
        """See ``RolloutEngine``. Without routed experts on a GPU, and while their tokens are recomputed."""
        found, states = {}, self._in_flight.states()
        for key, first in since.items():
            tokens, log_probs = generated(states[key], first)
            details = self._details.so_far(states[key], first, len(tokens), computed=self._in_flight.is_computed)
            found[key] = Completion(tokens, log_probs, truncated=False, **details)
        return found

    def preempt(self) -> None:
        """See ``RolloutEngine``."""
        self._statistics.preempted(self._in_flight.preempt())

    @property
    def unfinished(self) -> int:
        """Number of requests in flight."""
        return int(self._engine.get_num_unfinished_requests())

    def statistics(self) -> dict[str, float]:
        """See ``RolloutEngine``."""
        guesses = self._engine.collective_rpc("take_guess_counts")[0] if self._section.speculative else None
        return self._statistics.take() | guess_metrics(guesses)

    def choices(self) -> dict[str, str]:
        """vLLM's choices on this machine: its model runner, and the kernels of its attention layers."""
        found: dict[str, str] = self._engine.collective_rpc(_choices)[0]
        return found

    def check_memory(self) -> None:
        """See ``RolloutEngine``. Nothing to check on a CPU."""
        free, total = vllm_memory.device_memory()
        if total is not None:
            vllm_memory.check_free(self._model, self._section, free + self._held, total)

    def wake_weights(self) -> None:
        """Allocates the weights' memory, on a CPU when they are opened. Does nothing if they are awake."""
        self._check_idle()
        self._wake(_WEIGHTS)

    def discover_shards(self, tensors: Sequence[TensorSpec]) -> Sequence[Shard]:
        """See ``RolloutEngine``. For a known family those of its table."""
        if self._layout is None:
            self._check_idle()
            self.wake_weights()
            self._begin_sync()
            load = functools.partial(self._weights.fill, complete=False)
            dtype, buffers = self._engine.model_config.dtype, self._weights.buffers()
            self._layout = discover_layout(self._weights.open(), load, tensors, dtype, buffers)
            held = {shard.local_name for shard in self._layout.shards}
            self._buffers = {name: own for name, own in buffers.items() if name in held}
            self._weights.close()
            self.sleep()
        return self._layout.shards

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by vLLM's names, as in ``engine_parameters``."""
        shapes = self._weights.shapes | {name: tuple(own.shape) for name, own in self._buffers.items()}
        views = self._layout.views if self._layout is not None else {}
        return shapes | {name: view.shape(shapes[view.parameter]) for name, view in views.items()}

    def open_weights(self, *, in_flight: bool = False) -> Mapping[str, Tensor]:
        """Every parameter, to be written in place before ``close_weights``; rows of padding are already zero.

        On a CPU ``close_weights`` frees the tensors' memory: vLLM uses packed weights.
        """
        self._begin_sync(in_flight=in_flight)
        return self._open()

    def close_weights(self) -> None:
        """Recomputes what vLLM derives from the parameters, and drops cached prefixes."""
        self._weights.close()
        self._end_sync()

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], check: CheckWeights | None = None) -> None:
        """Loads all weights, whole tensors by HuggingFace's names, through vLLM's own loader."""
        self._begin_sync()
        parameters = self._open()
        self._weights.fill(tensors)
        if check is not None:
            check(parameters)
        self._weights.close()
        self._end_sync()

    def shareable(self) -> frozenset[str]:
        """Parameters that vLLM's kernels read unpacked; none once CUDA graphs are captured."""
        names = self._weights.shareable()
        if isinstance(self._layout, TableLayout):
            return names
        dtype = self._engine.model_config.dtype  # other ones are sent in it, too
        return frozenset(name for name in names if self._weights.dtypes[name] == dtype)

    def share(self, name: str, tensor: Tensor) -> None:
        """Replaces the parameter by ``tensor``; part of a weight sync, before or after ``open_weights``."""
        shape = self._weights.shapes[name]
        assert name in self._weights.shareable(), name
        assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)}, not {shape}"
        self._begin_sync()
        self._weights.share(name, tensor)
        self._shared.add(name)

    def wake_cache(self) -> None:
        """Allocates the KV cache. Does nothing if it is awake."""
        self._wake(_CACHE)

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache."""
        if self._asleep == {_WEIGHTS, _CACHE}:
            return
        self._wake(_WEIGHTS)  # vLLM 0.25 would unmap sleeping memory a second time
        self._wake(_CACHE)
        self._engine.sleep(level=2)
        self._asleep, self._loaded = {_WEIGHTS, _CACHE}, False

    def shutdown(self) -> None:
        """Frees the engine and destroys vLLM's process groups; the default group stays. Collective."""
        from vllm.distributed import destroy_model_parallel

        self._engine.model_executor.shutdown()
        destroy_model_parallel()
        del self._engine, self._statistics, self._in_flight, self._details

    def _completed(self, outputs: Sequence[Any]) -> list[tuple[int, Completion]]:
        """Completions of vLLM's outputs of finished requests."""
        for output in outputs:
            self._statistics.end(int(output.request_id), len(output.prompt_token_ids), output.num_cached_tokens)
        found = [(int(o.request_id), completion_of(o.outputs[0], **self._details.of_finished(o))) for o in outputs]
        self._details.end([key for key, _ in found])
        return found

    def _open(self) -> Mapping[str, Tensor]:
        """Opens the weights, with zeros where nothing is written."""
        parameters = self._weights.open() | self._buffers
        if self._layout is None:
            return parameters
        self._layout.zero_padding({name: own for name, own in parameters.items() if name not in self._shared})
        views = {name: viewed(parameters[view.parameter], view) for name, view in self._layout.views.items()}
        return parameters | views

    def _find_weights(self, section: RolloutSection) -> Weights:
        def find(model: nn.Module) -> Weights:
            if not self._on_gpu:
                return cast(Weights, model.packed_weights)
            return LiveWeights(model, self._engine.model_config.dtype, captured=section.cuda_graphs or section.compile)

        return cast(Weights, self._engine.apply_model(find)[0])

    def _check_idle(self) -> None:
        if self.unfinished:
            raise RuntimeError(
                f"{self.unfinished} requests are in flight: finish or abort them before weights are synced"
            )

    def _begin_sync(self, *, in_flight: bool = False) -> None:
        if in_flight:
            self._in_flight.check_settled()
        else:
            self._check_idle()
        assert _WEIGHTS not in self._asleep, "weight sync before wake_weights()"
        self._loaded = False

    def _end_sync(self) -> None:
        self._in_flight.forget_prefixes()
        if self._section.speculative is not None:
            self._engine.collective_rpc("restart_speculation")
        self._loaded = True

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            release_cached()  # vLLM maps memory from the driver, and 0.25 does not empty PyTorch's cache
            self._engine.wake_up(tags=[tag])
            self._asleep.discard(tag)


def _choices(worker: Any) -> dict[str, str]:
    """``VllmEngine.choices`` in vLLM's worker."""
    kernels = {type(module.impl).__name__ for module in worker.get_model().modules() if hasattr(module, "impl")}
    runner = "V2" if getattr(worker, "use_v2_model_runner", False) else "V1"
    return {"model runner": runner, "attention": ", ".join(sorted(kernels))}


def spans_nodes(tp: int) -> bool:
    """True if this rank's engine has ranks on several nodes. Collective over the job's ranks."""
    places: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(places, RankInfo.from_environ().place)
    first = dist.get_rank() // tp * tp
    return len(set(places[first : first + tp])) > 1


def _start(arguments: dict[str, Any], model: ServedModel, section: RolloutSection, total: int | None) -> Any:
    """Starts vLLM's engine; ``total``: bytes of the GPU, None on a CPU. If vLLM refuses one rank's memory, all ranks
    raise the same error."""
    memory = engine_bytes(section, model.shape, model.dtype, total)
    if total is not None:
        arguments = {**arguments, "gpu_memory_utilization": vllm_memory.claimed_share(section, memory, total)}
    with process_state_restored():
        try:
            return _build(arguments)
        except vllm_memory.EngineRefused as refused:
            instead = "end other processes on the GPU"
            raise vllm_memory.explain(refused, section, memory, model.max_model_len, instead) from refused


def _build(arguments: dict[str, Any]) -> Any:
    """Builds the engine core and its scheduler in this process, driven by ``add_request`` and ``step``."""
    os.environ[env.VLLM_ENABLE_V1_MULTIPROCESSING] = "0"
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # vLLM's external launcher reads its rank from torchrun's variables.
    info = RankInfo.from_environ()
    os.environ[env.RANK], os.environ[env.LOCAL_RANK] = str(info.rank), str(info.local_rank)

    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    check_fields(arguments, EngineArgs.__dataclass_fields__)
    keep_transformers_classes()
    try:
        with no_engine_queue():
            return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"vLLM rejects the configuration: {error}",
            where="rollout",
            remedy="fix what it names; memory is set by rollout.kv_cache_gib and rollout.gpu_memory_utilization",
        ) from error


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1

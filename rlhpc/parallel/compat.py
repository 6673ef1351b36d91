"""Everything that is patched, each with its reason and the upstream line (megatron-core 0.16.1).

On a machine with a GPU only ``hide_extensions``, ``adopt_optimizer``, ``hold_what_is_sent`` and
``exchange_megatron_globals`` change anything. The rest makes Megatron's unconditional CUDA calls answer for the CPU,
inside ``megatron_device()`` and nowhere else.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from rlhpc.core.storage import patiently
from rlhpc.parallel.saving import patient_writer, write_archive

CPU = torch.device("cpu")
_ONEDNN_PRODUCTS = 1 << 22  # multiplications below which MKL is as fast


def device() -> torch.device:
    """Where tensors of this rank live. The rank has chosen its GPU before."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


# Optional packages that Megatron tries, by the names that it imports; NVIDIA's images have most of them.
_EXTENSIONS = frozenset(
    {
        "amp_C",
        "apex",
        "deep_ep",
        "emerging_optimizers",
        "fast_hadamard_transform",
        "flash_attn",
        "flash_attn_3",
        "flash_mla",
        "flashattn_hopper",
        "fused_weight_gradient_mlp_cuda",
        "transformer_engine",
        "transformer_engine_torch",
    }
)


@functools.cache
def hide_extensions() -> None:
    """Let Megatron find none of its optional packages, in any image. Called before anything imports Megatron.

    Each changes what runs: FusedAdam and the master weights' owner (optimizer/__init__.py:12, distrib_optimizer.py:20),
    norm and clipping of gradients (clip_grads.py:10, optimizer.py:16), the router's product (moe_utils.py:1192), the
    rng tracker (random.py:366/434), fp8 tensors in checkpoints (strategies/torch.py:66), weight gradients
    (layers.py:45), attention (attention.py:60-115), norms (fused_layer_norm.py:15, transformer_block.py:37). We bring
    modules of our own for these. Packages that do not suit the installed PyTorch also fail with other errors than
    ImportError, which Megatron does not expect. flash-attn is used by rlhpc itself (backends/megatron/attention.py).
    """
    import_ = builtins.__import__

    def find(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        hidden = level == 0 and name.partition(".")[0] in _EXTENSIONS
        if hidden and str((globals or {}).get("__name__", "")).startswith("megatron."):
            raise ModuleNotFoundError(f"{name} is hidden from Megatron", name=name)
        return import_(name, globals, locals, fromlist, level)

    builtins.__import__ = find


hide_extensions()


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Within it, megatron-core runs on this rank's device. With a GPU it does nothing; nested use is free."""
    if torch.cuda.is_available() or _CpuForCuda.active:
        yield
        return
    stand_ins = _stand_ins()
    originals = [(module, name, getattr(module, name)) for module, name, _ in stand_ins]
    try:
        for module, name, stand_in in stand_ins:
            setattr(module, name, stand_in)
        with _CpuForCuda():
            yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


class _Stream:
    """A stream of a device that runs everything in order at once."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


# Called by name at about 20 places: layers, mappings, p2p communication, param_and_grad_buffer.py:800/806.
_CUDA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: CPU,
    "current_stream": lambda *args, **kwargs: _Stream(),
    "stream": contextlib.nullcontext,
    "Stream": _Stream,
    "synchronize": lambda *args, **kwargs: None,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
}


def _splits_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Upstream (moe_utils.py:1093) converts what is on a GPU only; all_to_all_single refuses tensors as splits."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _all_gather(outputs: list[torch.Tensor], part: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Parts of unequal length too (mappings.py:150), which NCCL takes and gloo does not."""
    if async_op or len({len(output) for output in outputs}) == 1:
        return _torch_all_gather(outputs, part, group=group, async_op=async_op)
    padded = part.new_zeros(max(map(len, outputs)), *part.shape[1:])
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in outputs]
    _torch_all_gather(gathered, padded, group=group)
    for output, whole in zip(outputs, gathered, strict=True):
        output.copy_(whole[: len(output)])
    return None


def _reduce_scatter(
    output: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> Any:
    """The way back of ``_all_gather`` (mappings.py:196): gloo has no reduce_scatter of unequal parts."""
    if options.get("async_op") or len({len(part) for part in parts}) == 1:
        return _torch_reduce_scatter(output, parts, op=op, group=group, **options)
    whole = torch.cat(parts)
    dist.all_reduce(whole, op=op, group=group)
    output.copy_(whole.split([len(part) for part in parts])[dist.get_rank(group)])
    return None


_torch_all_gather, _torch_reduce_scatter = dist.all_gather, dist.reduce_scatter
# Only where expert tensor parallelism and expert parallelism meet.
_UNEVEN_COLLECTIVES: dict[str, Callable[..., Any]] = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}

# Compared as strings in distrib_optimizer.py:361/420/582, clip_grads.py:167 and optimizer.py:671.
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


class _CpuForCuda(TorchFunctionMode):
    """What no attribute reaches: device="cuda" literals (schedules.py:596/2138, optimizer.py:481/485,
    clip_grads.py:103/174, utils.py:1207), pin_memory, ``Tensor.cuda()`` and ``Tensor.type()``.

    Only calls made by megatron.core are changed.
    """

    active = False

    def __enter__(self) -> _CpuForCuda:
        _CpuForCuda.active = True
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        _CpuForCuda.active = False
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward and kwargs.get("grad_tensors") and not kwargs.get("inputs"):
            return self._backward(args[0], kwargs["grad_tensors"])
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core"):
            return func(*args, **kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.matmul or func is torch.Tensor.matmul:
            return _matmul(*args)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        return func(*args, **kwargs)

    def _backward(self, tensors: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
        """torch.autograd.backward would leave this mode in the middle of a pass, where recomputation calls it
        (tensor_parallel/random.py:566/614)."""
        super().__enter__()
        try:
            torch.autograd.Variable._execution_engine.run_backward(
                tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            super().__exit__(None, None, None)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product, float32 ones by oneDNN: PyTorch gives them to MKL, which takes half its speed on AMD's processors.

    For the linear layers' products (tensor_parallel/layers.py:341/351/488/531/614), which run outside autograd. Those
    of the backward pass are seen because deallocate_pipeline_outputs makes Megatron call the autograd engine itself,
    and in recomputation because ``_backward`` does.
    """
    suits = a.dtype is torch.float32 and b.dtype is torch.float32 and b.dim() == 2 and not torch.is_grad_enabled()
    if not (suits and a.numel() * b.size(1) >= _ONEDNN_PRODUCTS and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return torch.matmul(a, b)
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


# random.py binds torch.cuda's internals at import: the rng tracker's fork() needs the CPU generator instead.
_RNG_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_get_cuda_rng_state": lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    "_set_cuda_rng_state": lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
}


def _stand_ins() -> list[tuple[Any, str, Callable[..., Any]]]:
    """(module, name, what it is while Megatron runs)."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    return [
        *((torch.cuda, *item) for item in _CUDA_FUNCTIONS.items()),
        *((random, *item) for item in _RNG_FUNCTIONS.items()),
        *((dist, *item) for item in _UNEVEN_COLLECTIVES.items()),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _splits_on_host),
    ]


def adopt_optimizer(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Let Megatron build ``make(params=groups, lr=…, betas=…, …)``, which keeps ``step`` in its parameter groups, where
    it takes the FusedAdam that it finds (optimizer/__init__.py:357).

    Megatron's path for torch.optim.AdamW breaks on checkpoints (distrib_optimizer.py:642 asserts one step, :940 misses
    the key, :818-822 alias one step tensor so that Adam advances once per parameter after a resume); its check of the
    class (:515) knows no others.
    """
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = make, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = torch.optim.Optimizer, True, True


@functools.cache
def hold_what_is_sent() -> None:
    """Let a send that is under way hold its tensor's memory. For interleaved stages, whose schedule sends and goes on.

    Before the schedule waits for a send it takes the data out of the tensor sent (schedules.py:1600; upstream waits
    first in later versions). The send has the tensor, not its memory, and that is used again: over gloo, and over NCCL
    since PyTorch records no streams for it, the next stage gets what comes to lie there. Wrong losses, and no error.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    p2p_ops = p2p_communication._p2p_ops

    def send_aliases(
        *, tensor_send_prev: torch.Tensor | None, tensor_send_next: torch.Tensor | None, **options: Any
    ) -> Any:
        prev, following = (None if sent is None else sent.detach() for sent in (tensor_send_prev, tensor_send_next))
        return p2p_ops(tensor_send_prev=prev, tensor_send_next=following, **options)

    p2p_communication._p2p_ops = send_aliases


MegatronGlobals = dict[str, Any]


def exchange_megatron_globals(values: MegatronGlobals) -> MegatronGlobals:
    """Put other groups in force, none at all for an empty dict; the answer is those that were.

    Megatron finds its groups in globals (parallel_state.py:27-142), of which there are one set: two models that are
    cut in different ways take turns.
    """
    from megatron.core import parallel_state

    former = {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}
    for name, value in former.items():
        setattr(parallel_state, name, values.get(name, {} if isinstance(value, dict) else None))
    return former


@contextlib.contextmanager
def patient_saves(folder: Path, failures: list[OSError]) -> Iterator[None]:
    """Within it, dist_checkpointing waits for a file system that fails (rlhpc.core.storage) and writes files again from
    memory, because after a failed fsync the kernel may have dropped their data.

    Upstream each rank's shards are tried once (filesystem_async.py:342). What rank 0 alone reads and writes, between
    collectives, raises on rank 0 alone while the others wait for it for ever (serialization.py:383/411/422,
    state_dict_saver.py:112/243). Here such errors go into ``failures`` instead, for the ranks to agree on afterwards.
    """
    stand_ins = _patient_stand_ins(folder, failures)
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _patient_stand_ins(checkpoint: Path, failures: list[OSError]) -> list[tuple[Any, str, Any]]:
    from megatron.core.dist_checkpointing import core, serialization
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async

    writer, saver = filesystem_async.FileSystemWriterAsync, common.TorchCommonSaveStrategy
    shared_queue = filesystem_async._get_write_results_queue

    def deferred(act: Callable[..., Any]) -> Callable[..., Any]:
        def try_(*args: Any) -> Any:
            try:
                return patiently(lambda: act(*args), checkpoint)
            except OSError as error:
                failures.append(error)
                return args[-1]  # what prepare_local_plan answers; the others answer nothing

        return try_

    def save_common(self: Any, state: Any, folder: str) -> None:
        if dist.get_rank() == 0:
            write_archive(Path(folder, common.COMMON_STATE_FNAME), state)

    def save_config(config: Any, folder: str) -> None:
        core.save_config(config, folder)
        with open(Path(folder, core.CONFIG_FNAME)) as file:
            os.fsync(file.fileno())

    return [
        # Only asked whether the folder is empty, for a warning. Ours is new.
        (serialization, "Path", lambda path: SimpleNamespace(iterdir=lambda: iter(()))),
        (serialization, "save_config", deferred(save_config)),
        (saver, "save_common", deferred(save_common)),
        (writer, "prepare_local_plan", deferred(writer.prepare_local_plan)),
        (writer, "finish", deferred(writer.finish)),
        (writer, "write_preloaded_data", staticmethod(patient_writer(writer.write_preloaded_data))),
        # All saves share one queue of results (filesystem_async.py:51). Of two models saved in the background at once,
        # each would take the other's into its metadata if the second one's writer ends first.
        (filesystem_async, "_get_write_results_queue", lambda: shared_queue()._manager.Queue()),
    ]

"""CPU versions of the CUDA calls that megatron-core makes unconditionally. Patches nothing: ``compat.py`` does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_ONEDNN_PRODUCTS = 1 << 22  # multiplications below which MKL is as fast

# random.py binds torch.cuda's internals at import: the RNG tracker's fork() needs the CPU generator instead.
RNG_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_get_cuda_rng_state": lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    "_set_cuda_rng_state": lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
}

# Compared as strings in distrib_optimizer.py:361/420/582, clip_grads.py:167 and optimizer.py:671.
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class _Stream:
    """Stream of a device that runs everything in order and at once."""

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


# Called by name in about 20 places: layers, mappings, p2p communication, param_and_grad_buffer.py:800/806.
CUDA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: CPU,
    "current_stream": lambda *args, **kwargs: _Stream(),
    "stream": contextlib.nullcontext,
    "Stream": _Stream,
    "synchronize": lambda *args, **kwargs: None,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
}


def _all_gather(outputs: list[torch.Tensor], part: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """Gathers parts, also of unequal length (mappings.py:150), which NCCL accepts and gloo does not."""
    if options.get("async_op") or len({len(output) for output in outputs}) == 1:
        return _torch_all_gather(outputs, part, group=group, **options)
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
    """Inverse of ``_all_gather`` (mappings.py:196): gloo has no reduce_scatter of unequal parts."""
    if options.get("async_op") or len({len(part) for part in parts}) == 1:
        return _torch_reduce_scatter(output, parts, op=op, group=group, **options)
    whole = torch.cat(parts)
    dist.all_reduce(whole, op=op, group=group)
    output.copy_(whole.split([len(part) for part in parts])[dist.get_rank(group)])
    return None


_torch_all_gather, _torch_reduce_scatter = dist.all_gather, dist.reduce_scatter
# Needed only where expert tensor parallelism and expert parallelism combine.
UNEVEN_COLLECTIVES: dict[str, Callable[..., Any]] = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}


class CpuForCuda(TorchFunctionMode):
    """Redirects what no attribute reaches: device="cuda" literals (schedules.py:596/2138, optimizer.py:481/485,
    clip_grads.py:103/174, utils.py:1207), pin_memory, ``Tensor.cuda()`` and ``Tensor.type()``.

    Changes only calls made by megatron.core, and products in backends/kernels.
    """

    active = False

    def __enter__(self) -> CpuForCuda:
        CpuForCuda.active = True
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        CpuForCuda.active = False
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward and kwargs.get("grad_tensors") and not kwargs.get("inputs"):
            return self._backward(args[0], kwargs["grad_tensors"])
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if func in _PRODUCTS and caller.startswith(("megatron.core", "rlhpc.backends.kernels")):
            return _matmul(*args)
        if not caller.startswith("megatron.core"):
            return func(*args, **kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        return func(*args, **kwargs)

    def _backward(self, tensors: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
        """Keeps this mode on: torch.autograd.backward would leave it in the middle of a pass, where recomputation calls
        it (tensor_parallel/random.py:566/614)."""
        super().__enter__()
        retain_graph, create_graph = False, False
        try:
            torch.autograd.Variable._execution_engine.run_backward(
                tensors, gradients, retain_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            super().__exit__(None, None, None)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product; in float32 by oneDNN, because PyTorch calls MKL, which runs at half speed on AMD processors.

    For the linear layers' products (tensor_parallel/layers.py:341/351/488/531), which run outside autograd. Those
    of the backward pass arrive here because deallocate_pipeline_outputs makes Megatron call the autograd engine itself,
    and those of recomputation because ``_backward`` does.
    """
    suits = a.dtype is torch.float32 and b.dtype is torch.float32 and b.dim() == 2 and not torch.is_grad_enabled()
    if not (suits and a.numel() * b.size(1) >= _ONEDNN_PRODUCTS and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return torch.matmul(a, b)
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )

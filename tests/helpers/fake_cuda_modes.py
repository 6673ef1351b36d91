"""Placement of tensors: what the fake CUDA device (``tests/helpers/fake_cuda.py``) changes in PyTorch's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import _engine_run_backward
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.helpers.parts import key_of

_CPU = torch.device("cpu")
# Operators that accept tensors of both devices on a real GPU too.
_MIX = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}


class Device(Protocol):
    """Registers tensors on the device and in pinned memory."""

    def holds(self, tensor: torch.Tensor) -> bool: ...

    def pinned(self, tensor: torch.Tensor) -> bool: ...

    def mark(self, tensor: torch.Tensor, on_device: bool) -> None: ...

    def mark_pinned(self, tensor: torch.Tensor) -> None: ...

    def device_of(self, storage: Any) -> torch.device: ...


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor consists of, such as the local part of a sharded one."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for one in inner if isinstance(one, torch.Tensor) for part in parts_of(one)]


class Registry:
    """Set of storages. The address of a freed storage is not reused while it is listed."""

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}
        self._most = self._peak = 0  # upper bound of live bytes; peak of live bytes when a storage was added

    def add(self, storage: Any) -> None:
        if key_of(storage) in self._held:
            return
        self._held[key_of(storage)] = StorageWeakRef(storage)
        self._most += storage.nbytes()
        if self._most > self._peak:
            self._peak = max(self._peak, self.nbytes)

    def discard(self, storage: Any) -> None:
        self._held.pop(key_of(storage), None)

    def __contains__(self, storage: Any) -> bool:
        return key_of(storage) in self._held

    def alive(self) -> Iterator[Any]:
        for key, reference in list(self._held.items()):
            if reference.expired():
                del self._held[key]
            else:
                yield torch.UntypedStorage._new_with_weak_ptr(reference.cdata)

    @property
    def nbytes(self) -> int:
        self._most = sum(storage.nbytes() for storage in self.alive())
        return self._most

    @property
    def peak(self) -> int:
        """Peak bytes since ``reset_peak``."""
        self._peak = max(self._peak, self.nbytes)
        return self._peak

    def reset_peak(self) -> None:
        self._peak = 0


class Generator(torch.Generator):
    """A CPU generator; one made for the device reports that device."""

    def __init__(self, device: Any = "cpu") -> None:
        self._on_device = _names_cuda(device)

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self._on_device else _CPU


class _Moved(torch.autograd.Function):
    """A copy on the other device; its gradient returns to this one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, on_device: bool, cuda: Device) -> torch.Tensor:
        ctx.on_device, ctx.cuda = on_device, cuda
        copy = tensor.clone()
        cuda.mark(copy, on_device)
        return copy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        copy = gradient.clone()
        ctx.cuda.mark(copy, not ctx.on_device)
        return copy, None, None


class Functions(TorchFunctionMode):
    """Python interface: calls for the device run on the CPU, and their results are registered."""

    def __init__(self, cuda: Device) -> None:
        super().__init__()
        self._cuda = cuda
        self._getters: dict[Any, Callable[[torch.Tensor], Any]] = {
            torch.Tensor.device: lambda tensor: cuda.device_of(parts_of(tensor)[0].untyped_storage()),
            torch.Tensor.is_cuda: cuda.holds,
            torch.Tensor.is_cpu: lambda tensor: not cuda.holds(tensor),
        }
        self._methods: dict[Any, Callable[..., Any]] = {
            torch.Tensor.cuda: lambda tensor, *_, **__: self._moved(tensor, True),
            torch.Tensor.cpu: lambda tensor, *_, **__: self._moved(tensor, False),
            torch.Tensor.get_device: lambda tensor: 0 if cuda.holds(tensor) else -1,
            torch.Tensor.is_pinned: lambda tensor, *_: cuda.pinned(tensor),
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.record_stream: lambda *_: None,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.type: self._type,
            torch.Tensor.backward: self._backward,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__" and func.__self__ in self._getters:
            return self._getters[func.__self__](args[0])
        if func in self._methods:
            return self._methods[func](*args, **kwargs)
        pinned = bool(kwargs.pop("pin_memory", False))
        args, kwargs, target = self._with_cpu(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._refuse_other_generator(kwargs.get("generator"), tensors, target)
        given = {key_of(part.untyped_storage()) for tensor in tensors for part in parts_of(tensor)}
        result = func(*args, **kwargs)
        if target is None and not given:
            target = False
        if target is not None:
            result = tree_map_only(torch.Tensor, lambda tensor: self._placed(tensor, target, given), result)
        if pinned:
            self._cuda.mark_pinned(result)
        return result

    def _with_cpu(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], bool | None]:
        """The call with the CPU as device, and whether its result belongs on the device; None: unspecified."""
        target: bool | None = None
        device = kwargs.get("device")
        if device is None and func in _device_constructors():
            device = torch.utils._device.CURRENT_DEVICE  # of ``with torch.device(...)``
        if isinstance(device, torch.device | str | int):
            target = _names_cuda(device)
            if target:
                kwargs["device"] = _CPU
        if func is torch.Tensor.to and len(args) > 1:
            second = args[1]
            if isinstance(second, torch.Tensor):
                target = self._cuda.holds(second)
            elif isinstance(second, str | torch.device) or (isinstance(second, int) and not isinstance(second, bool)):
                target = _names_cuda(second)
                args = (args[0], _CPU, *args[2:]) if target else args
        return args, kwargs, target

    def _refuse_other_generator(
        self, generator: Generator | None, tensors: Sequence[torch.Tensor], target: bool | None
    ) -> None:
        on_device = target if target is not None else any(map(self._cuda.holds, tensors))
        if isinstance(generator, torch.Generator) and _names_cuda(generator.device) != on_device:
            wanted, found = ("cuda", "cpu") if on_device else ("cpu", "cuda")
            raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")

    def _placed(self, tensor: torch.Tensor, on_device: bool, given: set[int]) -> torch.Tensor:
        """``tensor`` on the requested device; a copy if it shares memory with an argument."""
        if self._cuda.holds(tensor) == on_device or tensor.device.type == "meta":
            return tensor
        if any(key_of(part.untyped_storage()) in given for part in parts_of(tensor)):
            return self._moved(tensor, on_device)
        self._cuda.mark(tensor, on_device)
        return tensor

    def _moved(self, tensor: torch.Tensor, on_device: bool) -> torch.Tensor:
        if self._cuda.holds(tensor) == on_device:
            return tensor
        return _Moved.apply(tensor, on_device, self._cuda)

    def _pin(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if self._cuda.holds(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        copy = tensor.clone()
        self._cuda.mark_pinned(copy)
        return copy

    def _backward(
        self,
        tensor: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """In the mode, which PyTorch leaves for its own methods: hooks and recomputation are part of the pass."""
        assert inputs is None, "gradients of all leaves"
        gradient = torch.ones_like(tensor) if gradient is None else gradient
        flags = {"allow_unreachable": True, "accumulate_grad": True}
        with self:
            _engine_run_backward((tensor,), (gradient,), retain_graph or create_graph, create_graph, (), **flags)

    def _numpy(self, tensor: torch.Tensor, **options: Any) -> Any:
        if self._cuda.holds(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return torch.Tensor.numpy(tensor, **options)

    def _type(self, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = torch.Tensor.type(tensor, *args, **options)
        if isinstance(found, str) and self._cuda.holds(tensor):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


class Dispatch(TorchDispatchMode):
    """Operators, also in backward passes: results of the device's tensors are on the device."""

    def __init__(self, cuda: Device) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held = any(map(self._cuda.holds, tensors))
        if held:
            self._refuse_mixture(func, tensors)
        result = func(*args, **kwargs)
        # Zeros for missing gradients, which autograd creates on the tensors' device.
        held = held or (not tensors and torch._C._current_graph_task_id() != -1)
        if held and not (tensors and _name(func) in _MIX and not self._cuda.holds(tensors[0])):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._cuda.mark(leaf, True)
        return result

    def _refuse_mixture(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        if _name(func) in _MIX or func.namespace == "c10d":
            return
        others = [tensor for tensor in tensors if tensor.dim() and not self._cuda.holds(tensor)]
        if others:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got tensors on cuda:0 and on the CPU, of"
                f" shapes {[tuple(tensor.shape) for tensor in others]}"
            )


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _names_cuda(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"

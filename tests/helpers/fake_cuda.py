"""A stand-in for CUDA devices: CPU tensors that answer for a GPU, so that code for GPUs runs on any machine.

``with FakeCuda() as cuda:`` makes ``torch.cuda`` report a device. A tensor created on it, moved to it or computed from
its tensors is a CPU tensor whose storage is registered: ``device`` and ``is_cuda`` answer for the GPU. An operation on
tensors of both devices raises RuntimeError, as CUDA does, so that a missing ``device=`` is found. Streams and events
have nothing to wait for; ``calls`` lists what was asked of the device. NCCL groups become gloo groups. What it cannot
show is anything about kernels: their numbers are the CPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.tiers.gpu_branches import CONTEXT

GIB = 1 << 30
_CPU = torch.device("cpu")
_STORAGE_DEVICE = torch._C.StorageBase.device
# Take tensors of both devices on a real GPU too.
_MIX = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}


class Stream:
    """Runs everything in order, at once."""

    calls: list[tuple[Any, ...]]
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None:
        self.calls.append(("stream.synchronize",))

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """Has always happened."""

    calls: list[tuple[Any, ...]]

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        self.calls.append(("event.record",))

    def synchronize(self) -> None:
        self.calls.append(("event.synchronize",))

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Registry:
    """Storages with a property that CPU storages lack. A freed storage's address is not reused while it is listed."""

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}

    def add(self, storage: Any) -> None:
        if storage._cdata not in self._held:
            self._held[storage._cdata] = StorageWeakRef(storage)

    def discard(self, storage: Any) -> None:
        self._held.pop(storage._cdata, None)

    def __contains__(self, storage: Any) -> bool:
        return storage._cdata in self._held

    def alive(self) -> Iterator[Any]:
        for key, reference in list(self._held.items()):
            if reference.expired():
                del self._held[key]
            else:
                yield torch.UntypedStorage._new_with_weak_ptr(reference.cdata)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.alive())


class FakeCuda:
    """The context; see the module. ``total_gib`` is the memory of each of ``devices``."""

    def __init__(self, devices: int = 1, total_gib: float = 80.0, capability: tuple[int, int] = (9, 0)) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.backends: list[Any] = []  # that process groups were asked for
        self._devices, self._total, self._capability = devices, int(total_gib * GIB), capability
        self._current = 0
        self._stored, self._pinned = _Registry(), _Registry()
        self._registered: dict[int, int] = {}  # sizes by address
        self._rng = torch.Generator()
        self._stack = contextlib.ExitStack()

    def count(self, name: str) -> int:
        """How often it was called."""
        return sum(call[0] == name for call in self.calls)

    @property
    def bytes_held(self) -> int:
        """Bytes of the device's tensors that are alive."""
        return self._stored.nbytes

    @property
    def bytes_pinned(self) -> int:
        """Bytes of pinned memory: of tensors made so, and of memory registered with the driver."""
        return self._pinned.nbytes + sum(self._registered.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._stored

    def pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        registered = any(start <= address < start + size for start, size in self._registered.items())
        return registered or tensor.untyped_storage() in self._pinned

    def __enter__(self) -> FakeCuda:
        for owner, name, value in self._patches():
            self._stack.enter_context(mock.patch.object(owner, name, value, create=True))
        self._stack.enter_context(_coverage_context())
        self._stack.enter_context(_Dispatch(self))
        self._stack.enter_context(_Functions(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def mark(self, tensor: torch.Tensor, on_device: bool) -> None:
        storage = tensor.untyped_storage()
        (self._stored.add if on_device else self._stored.discard)(storage)

    def mark_pinned(self, tensor: torch.Tensor) -> None:
        self._pinned.add(tensor.untyped_storage())

    def device_of(self, storage: Any) -> torch.device:
        return torch.device("cuda", self._current) if storage in self._stored else _STORAGE_DEVICE.__get__(storage)

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        cuda, stands = torch.cuda, self._functions()
        for name, value in stands.items():
            yield cuda, name, value
        yield cuda.random, "get_rng_state", stands["get_rng_state"]
        yield cuda.random, "set_rng_state", stands["set_rng_state"]
        yield torch.UntypedStorage, "device", property(self.device_of)
        yield dist, "init_process_group", self._without_nccl(dist.init_process_group)
        yield dist, "new_group", self._without_nccl(dist.new_group)

    def _functions(self) -> dict[str, Any]:
        properties = SimpleNamespace(
            name="NVIDIA H100 80GB HBM3",
            total_memory=self._total,
            major=self._capability[0],
            minor=self._capability[1],
            multi_processor_count=132,
            gcnArchName="",
        )
        cudart = SimpleNamespace(
            cudaHostRegister=self._recorded("cudaHostRegister", self._register),
            cudaHostUnregister=self._recorded("cudaHostUnregister", self._unregister),
            cudaError=SimpleNamespace(success=0),
        )
        # Classes: annotations of other packages name them.
        stream, event = (type(cls.__name__, (cls,), {"calls": self.calls}) for cls in (Stream, Event))
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device_count": lambda: self._devices,
            "current_device": lambda: self._current,
            "set_device": self._recorded("set_device", self._set_device),
            "synchronize": self._recorded("synchronize", lambda *_: None),
            "empty_cache": self._recorded("empty_cache", lambda: None),
            "mem_get_info": lambda *_: (self._total - self.bytes_held, self._total),
            "memory_allocated": lambda *_: self.bytes_held,
            "max_memory_allocated": lambda *_: self.bytes_held,
            "memory_reserved": lambda *_: self.bytes_held,
            "memory_stats": lambda *_: {"allocated_bytes.all.current": self.bytes_held},
            "reset_peak_memory_stats": self._recorded("reset_peak_memory_stats", lambda *_: None),
            "get_device_properties": lambda *_: properties,
            "get_device_name": lambda *_: properties.name,
            "get_device_capability": lambda *_: self._capability,
            "current_stream": lambda *_: stream(),
            "default_stream": lambda *_: stream(),
            "stream": contextlib.nullcontext,
            "Stream": stream,
            "Event": event,
            "default_generators": (self._rng,) * self._devices,
            "manual_seed": self._rng.manual_seed,
            "manual_seed_all": self._rng.manual_seed,
            "get_rng_state": lambda *_, **__: self._rng.get_state(),
            "set_rng_state": lambda state, *_, **__: self._rng.set_state(state),
            "cudart": lambda: cudart,
            "check_error": self._check_error,
        }

    def _register(self, address: int, size: int, flags: int = 0) -> int:
        taken = any(start < address + size and address < start + length for start, length in self._registered.items())
        if taken:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self._registered[address] = size
        return 0

    def _unregister(self, address: int) -> int:
        return 0 if self._registered.pop(address, None) else 713  # cudaErrorHostMemoryNotRegistered

    def _check_error(self, error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < self._devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._current = index

    def _recorded(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, *args))
            return act(*args)

        return call

    def _without_nccl(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            positional = start.__name__ == "init_process_group" and bool(args)
            backend = args[0] if positional else options.get("backend")
            self.backends.append(backend)
            if isinstance(backend, str) and "nccl" in backend:
                options["backend"] = "gloo"
                args = args[1:] if positional else args
            options.pop("device_id", None)
            return start(*args, **options)

        return call


class _Functions(TorchFunctionMode):
    """The Python interface: requests for the device become requests for the CPU, whose answer is registered."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._getters: dict[Any, Callable[[torch.Tensor], Any]] = {
            torch.Tensor.device: lambda tensor: cuda.device_of(tensor.untyped_storage()),
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
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__" and func.__self__ in self._getters:
            return self._getters[func.__self__](args[0])
        if func in self._methods:
            return self._methods[func](*args, **kwargs)
        pinned = bool(kwargs.pop("pin_memory", False))
        args, kwargs, target = self._with_cpu(func, args, kwargs)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs)
        if target is None and not given:
            target = False
        if target is not None:
            result = tree_map_only(torch.Tensor, lambda tensor: self._placed(tensor, target, given), result)
        if pinned:
            self._cuda.mark_pinned(result)
        return result

    def _with_cpu(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], bool | None]:
        """The call with the CPU for the device, and whether the answer is to be on the device; None: not said."""
        target: bool | None = None
        device = kwargs.get("device")
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

    def _placed(self, tensor: torch.Tensor, on_device: bool, given: set[int]) -> torch.Tensor:
        """``tensor`` on the side that was asked for; a copy where it shares memory with an argument."""
        if self._cuda.holds(tensor) == on_device or tensor.device.type == "meta":
            return tensor
        if tensor.untyped_storage()._cdata in given:
            return self._moved(tensor, on_device)
        self._cuda.mark(tensor, on_device)
        return tensor

    def _moved(self, tensor: torch.Tensor, on_device: bool) -> torch.Tensor:
        if self._cuda.holds(tensor) == on_device:
            return tensor
        copy = tensor.clone()
        self._cuda.mark(copy, on_device)
        return copy

    def _pin(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if self._cuda.holds(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        copy = tensor.clone()
        self._cuda.mark_pinned(copy)
        return copy

    def _numpy(self, tensor: torch.Tensor, **options: Any) -> Any:
        if self._cuda.holds(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return torch.Tensor.numpy(tensor, **options)

    def _type(self, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = torch.Tensor.type(tensor, *args, **options)
        if isinstance(found, str) and self._cuda.holds(tensor):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


class _Dispatch(TorchDispatchMode):
    """Operators, in backward passes too: what is computed from the device's tensors is on the device."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held = any(map(self._cuda.holds, tensors))
        if held:
            self._refuse_mixture(func, tensors)
        result = func(*args, **kwargs)
        # Zeros for gradients that are missing: autograd makes them where it takes the tensors to be.
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


@contextlib.contextmanager
def _coverage_context() -> Iterator[None]:
    """Lines that run with a stand-in are recorded as such, where coverage is measured (tests/tiers/gpu_branches.py)."""
    try:
        from coverage import Coverage
    except ImportError:
        yield
        return
    current = Coverage.current()
    if current is None:
        yield
        return
    current.switch_context(CONTEXT)
    try:
        yield
    finally:
        current.switch_context("")

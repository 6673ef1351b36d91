"""A fake CUDA device: CPU tensors that pose as GPU tensors, so that code for GPUs runs on any machine.

``with FakeCuda() as cuda:`` makes ``torch.cuda`` report a device. A tensor created on it, moved to it or computed from
its tensors is a CPU tensor with a registered storage, whose ``device`` and ``is_cuda`` are those of a GPU. An operation
on tensors of both devices raises RuntimeError, as in CUDA, which detects a missing ``device=``. Streams and events
never wait; ``calls`` records calls to the device. NCCL groups become gloo groups. The profiler reports each CPU
operator as a kernel. It shows nothing about GPU kernels: numbers and times are the CPU's.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.helpers.fake_cuda_modes import Dispatch, Functions, Generator, Registry, parts_of
from tests.helpers.fake_cuda_profiler import Profile
from tests.tiers.gpu_branches import CONTEXT

GIB = 1 << 30
_STORAGE_DEVICE = torch._C.StorageBase.device


class Stream:
    """A stream that runs everything immediately."""

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
    """An event that has always occurred."""

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


class FakeCuda:
    """The context manager. ``total_gib``: memory of each of ``devices``, of which CUDA context and libraries take
    ``context_gib``."""

    active: FakeCuda

    def __init__(
        self,
        devices: int = 1,
        total_gib: float = 80.0,
        capability: tuple[int, int] = (9, 0),
        *,
        context_gib: float = 0.0,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.backends: list[Any] = []  # requested for process groups
        self.mapped: dict[str, int] = {}  # bytes held outside PyTorch, by arbitrary names
        self._context_bytes = int(context_gib * GIB)
        self._devices, self._total, self._capability = devices, int(total_gib * GIB), capability
        self._current = 0
        self._stored, self._pinned, self._adopted = Registry(), Registry(), Registry()
        self._registered: dict[int, int] = {}  # sizes by address
        self._rng = torch.Generator()
        self._stack = contextlib.ExitStack()

    def count(self, name: str) -> int:
        """Number of calls."""
        return sum(call[0] == name for call in self.calls)

    @property
    def bytes_held(self) -> int:
        """Bytes of the device's live tensors."""
        return self._stored.nbytes

    @property
    def bytes_pinned(self) -> int:
        """Bytes of pinned memory: of pinned tensors, and registered with the driver."""
        return self._pinned.nbytes + sum(self._registered.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(self._holds(part.untyped_storage()) for part in parts_of(tensor))

    def _holds(self, storage: Any) -> bool:
        return storage in self._stored or storage in self._adopted

    def adopt(self, tensor: torch.Tensor) -> None:
        """Treat a CPU tensor as on the device from now on, in memory that ``mapped`` counts."""
        self._adopted.add(tensor.untyped_storage())

    def pinned(self, tensor: torch.Tensor) -> bool:
        (tensor,) = parts_of(tensor)
        address = tensor.untyped_storage().data_ptr()
        registered = any(start <= address < start + size for start, size in self._registered.items())
        return registered or tensor.untyped_storage() in self._pinned

    def __enter__(self) -> FakeCuda:
        self._stack.enter_context(mock.patch.object(FakeCuda, "active", self, create=True))
        for owner, name, value in self._patches():
            self._stack.enter_context(mock.patch.object(owner, name, value, create=True))
        self._stack.enter_context(_coverage_context())
        self._stack.enter_context(Dispatch(self))
        self._stack.enter_context(Functions(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def mark(self, tensor: torch.Tensor, on_device: bool) -> None:
        for part in parts_of(tensor):
            (self._stored.add if on_device else self._stored.discard)(part.untyped_storage())

    def mark_pinned(self, tensor: torch.Tensor) -> None:
        self._pinned.add(tensor.untyped_storage())

    def device_of(self, storage: Any) -> torch.device:
        return torch.device("cuda", self._current) if self._holds(storage) else _STORAGE_DEVICE.__get__(storage)

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        cuda, stands = torch.cuda, self._functions()
        for name, value in stands.items():
            yield cuda, name, value
        yield cuda.random, "get_rng_state", stands["get_rng_state"]
        yield cuda.random, "set_rng_state", stands["set_rng_state"]
        yield torch.UntypedStorage, "device", property(self.device_of)
        yield dist, "init_process_group", self._without_nccl(dist.init_process_group)
        yield dist, "new_group", self._without_nccl(dist.new_group)
        yield torch, "Generator", Generator
        yield torch.profiler, "profile", Profile
        yield torch.cuda.nccl, "version", lambda: (2, 27, 5)
        for owner, name in (
            (cuda.memory, "_record_memory_history"),
            (torch._C, "_cuda_attach_out_of_memory_observer"),
            (cuda.nvtx, "range_push"),
            (cuda.nvtx, "range_pop"),
        ):
            yield owner, name, self._recorded(name, lambda *_: None)
        yield cuda.memory, "_dump_snapshot", lambda file: Path(file).write_bytes(pickle.dumps({"segments": []}))

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
            cudaProfilerStart=self._recorded("cudaProfilerStart", lambda: 0),
            cudaProfilerStop=self._recorded("cudaProfilerStop", lambda: 0),
            cudaError=SimpleNamespace(success=0),
        )
        # Classes, because annotations of other packages refer to them.
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
            "mem_get_info": lambda *_: (self._free(), self._total),
            "memory_allocated": lambda *_: self.bytes_held,
            "max_memory_allocated": lambda *_: self._stored.peak,
            "memory_reserved": lambda *_: self.bytes_held,
            "memory_stats": lambda *_: {"allocated_bytes.all.current": self.bytes_held},
            "reset_peak_memory_stats": self._recorded("reset_peak_memory_stats", lambda *_: self._stored.reset_peak()),
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

    def _free(self) -> int:
        return self._total - self._context_bytes - sum(self.mapped.values()) - self.bytes_held

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


@contextlib.contextmanager
def _coverage_context() -> Iterator[None]:
    """Record lines that run on the fake device under a context of their own, for tests/tiers/gpu_branches.py."""
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

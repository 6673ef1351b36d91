"""Makes vLLM's CUDA sources importable on a CPU: stubs for compiled extensions, and a platform that reports an H200."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EXTENSIONS = ("_C", "_moe_C", "_rocm", "_flashmla", "_qutlass", "_rust", "cumem_allocator")
_FLASH = "vllm.vllm_flash_attn._vllm_fa"
# Set before vLLM is imported.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
}


def install(folder: Path) -> None:
    """Use the sources in ``folder`` in this process, which has not imported vLLM before."""
    assert "vllm" not in sys.modules
    os.environ.update(_ENVIRONMENT)
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, _Extensions())
    import torch

    torch.set_num_threads(1)
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[misc,assignment]
    _answer_for_operators()
    _pretend_cuda()
    import vllm
    import vllm.distributed.device_communicators.cuda_wrapper as cuda_wrapper
    from vllm.triton_utils import triton

    assert Path(vllm.__file__).is_relative_to(folder), vllm.__file__
    cuda_wrapper.CudaRTLibrary = _Nothing  # type: ignore[misc,assignment]
    triton.Config = _Config


class _Nothing:
    """Base class or instance of what needs a device."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Config:
    """What Triton chooses among for a kernel; vLLM's own stand-in for a missing Triton has no fields."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        self.num_stages, self.num_warps = options.get("num_stages", 2), options.get("num_warps", 4)


class _Stub(types.ModuleType):
    """A compiled module whose functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Extensions(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's compiled modules, which are not among the sources."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        package, _, last = name.rpartition(".")
        if name.startswith(_FLASH) or (package == "vllm" and last.startswith(_EXTENSIONS)):
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _answer_for_operators() -> None:
    """Operators that the compiled modules would register: what asks for support gets a no, the rest does nothing."""
    import torch._ops

    registered = torch._ops._OpNamespace.__getattr__

    def find(namespace: Any, name: str) -> Any:
        try:
            return registered(namespace, name)
        except AttributeError:
            if not namespace.name.startswith(("_C", "_moe_C")) or name.startswith("__"):
                raise
            if "supports" in name:
                return lambda *_, **__: False
            if models_are_built:
                return lambda *_, **__: None
            raise

    torch._ops._OpNamespace.__getattr__ = find  # type: ignore[method-assign]


models_are_built = False  # only then: at import vLLM asks which operators there are


def _pretend_cuda() -> None:
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):  # type: ignore[misc,valid-type]
        """One node of eight H200."""

        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 141 << 30)
        is_fully_connected = classmethod(lambda cls, ids: True)
        device_count = classmethod(lambda cls: 8)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        import_kernels = classmethod(lambda cls: None)

        @classmethod
        def is_cumem_allocator_available(cls) -> bool:
            return True

    platforms._current_platform = Hopper()

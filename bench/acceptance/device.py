"""GPU facts from the driver, through NVML or else nvidia-smi. No torch, no CUDA context."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from rlhpc.core import env

_GIB = 1 << 30
_QUERY = "name,memory.total,driver_version,clocks.max.sm,clocks.max.memory,power.limit"
_QUERY_SECONDS = 30.0
UNKNOWN = "unknown GPU"


def read_gpu() -> dict[str, Any]:
    """Fingerprint fields of the first visible GPU, without those that the driver does not report."""
    with opened() as nvml:
        if nvml is not None:
            return _from_nvml(nvml)
    rows = _smi(_QUERY)
    if not rows:
        return {"gpu": UNKNOWN}
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


def used_memory() -> int | None:
    """Bytes in use on the first visible GPU, by all processes; None if the driver does not answer."""
    with opened() as nvml:
        if nvml is not None:
            return used_by(nvml)
    rows = _smi("memory.used")
    return int(float(rows[0][0])) << 20 if rows else None


def used_by(nvml: Any) -> int:
    """The same through an open NVML. NVML counts memory reserved by the driver, cudaMemGetInfo does not: never mix the
    two in one comparison."""
    return int(nvml.nvmlDeviceGetMemoryInfo(_first(nvml)).used)


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """The initialised pynvml module; None if it, the library or the driver is missing."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
    except Exception:  # pynvml raises NVMLError, ctypes OSError
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _first(nvml: Any) -> Any:
    """Handle of the first GPU in CUDA_VISIBLE_DEVICES, which NVML itself ignores."""
    visible = os.environ.get(env.CUDA_VISIBLE_DEVICES, "").split(",")[0].strip()
    with contextlib.suppress(nvml.NVMLError):
        if visible.startswith(("GPU-", "MIG-")):
            return nvml.nvmlDeviceGetHandleByUUID(visible)
        if visible.isdecimal():
            return nvml.nvmlDeviceGetHandleByIndex(int(visible))
    return nvml.nvmlDeviceGetHandleByIndex(0)


def _from_nvml(nvml: Any) -> dict[str, Any]:
    handle = _first(nvml)
    readers: dict[str, Callable[[], Any]] = {
        "gpu": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "gpu_memory_gib": lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).total / _GIB, 1),
        "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
        "driver_cuda": lambda: _cuda_release(nvml.nvmlSystemGetCudaDriverVersion()),
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    }
    found: dict[str, Any] = {"gpu": UNKNOWN}
    for key, read in readers.items():
        with contextlib.suppress(nvml.NVMLError):  # some boards and virtual GPUs report less
            found[key] = read()
    return found


def _text(value: str | bytes) -> str:
    """Older releases of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _cuda_release(number: int) -> str:
    """13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _smi(fields: str) -> list[list[str]]:
    """One row of values per visible GPU; empty if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get(env.CUDA_VISIBLE_DEVICES):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _number(text: str, factor: float = 1.0) -> float | None:
    """The number, or None for placeholders such as [N/A]."""
    try:
        return round(float(text) * factor, 1)
    except ValueError:
        return None

"""Reads a GPU's state and error counters through NVML, NVIDIA's management library. No torch, no CUDA context.

Each call fails by itself: boards, MIG devices, older drivers and missing permissions lack some of them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_GIB = 1 << 30
_UUID_KINDS = ("GPU-", "MIG-")
# Bits of the reasons for reduced clocks that mean a problem. SwPowerCap, the power limit, is normal under load.
_THROTTLED = 0x08 | 0x20 | 0x40 | 0x80  # HwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown
# Totals over all links of flow-control CRC, data CRC, replay and recovery errors (NVML_FI_DEV_NVLINK_..._TOTAL).
_NVLINK_FIELDS = (38, 45, 52, 59)

Reader = Callable[[], float]


@dataclass(frozen=True)
class DeviceName:
    """Names by which a rank knows its GPU. ``uuid``: as CUDA reports it, with or without a prefix such as GPU-, or
    empty; ``visible``: value of CUDA_VISIBLE_DEVICES; ``index``: CUDA's index among the visible GPUs."""

    uuid: str
    visible: str | None
    index: int

    @property
    def entry(self) -> str:
        """Its entry of CUDA_VISIBLE_DEVICES, or its index where all are visible."""
        if self.visible is None:
            return str(self.index)
        entries = [entry.strip() for entry in self.visible.split(",")]
        return entries[self.index] if self.index < len(entries) else ""


def load() -> Any:
    """The initialized pynvml module. Raises LookupError without it, NVMLError without library or driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise LookupError("pynvml is missing; install nvidia-ml-py") from None
    nvml.nvmlInit()
    return nvml


def find(nvml: Any, name: DeviceName) -> Any:
    """Handle of a GPU or MIG device; raises LookupError if NVML does not know it.

    CUDA's own UUID comes first: CUDA orders GPUs by speed by default, NVML by PCI address, so an index may differ.
    """
    uuids = [name.entry] if name.entry.startswith("MIG-") else []  # CUDA may report the UUID of the whole GPU
    bare = name.uuid[4:] if name.uuid.startswith(_UUID_KINDS) else name.uuid
    uuids += [f"{kind}{bare}" for kind in _UUID_KINDS if bare]
    for uuid in uuids:
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
    with contextlib.suppress(nvml.NVMLError):
        if name.entry.startswith("GPU-"):
            return _by_prefix(nvml, name.entry)
        if name.entry.isdecimal() and not name.uuid:
            return nvml.nvmlDeviceGetHandleByIndex(int(name.entry))
    raise LookupError(f"NVML does not know the GPU {name.uuid or name.entry or name.index}")


def _by_prefix(nvml: Any, prefix: str) -> Any:
    """CUDA accepts the first characters of a UUID, NVML does not."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(prefix):
            return handle
    raise LookupError(f"NVML does not know the GPU {prefix}")


class NvmlDevice:
    """A GPU's readings. Of a MIG device, memory is its own; power, temperature, clocks and errors are the GPU's."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._own, self._whole = nvml, handle, handle
        with contextlib.suppress(Exception):  # not a MIG device, or a driver without MIG
            if nvml.nvmlDeviceIsMigDeviceHandle(handle):
                self._whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        self.error: Exception | None = None  # of the last call that failed

    def state(self) -> dict[str, float]:
        """Present state, without what the driver does not report."""
        nvml, own, whole = self._nvml, self._own, self._whole
        readers: Mapping[str, Sequence[Reader]] = {
            "utilization": [lambda: nvml.nvmlDeviceGetUtilizationRates(own).gpu / 100],
            "memory_used_gib": [lambda: nvml.nvmlDeviceGetMemoryInfo(own).used / _GIB],
            "power_watts": [lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1000],
            "power_limit_watts": [lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole) / 1000],
            "energy_joules": [lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(whole) / 1000],
            "temperature": [
                lambda: nvml.nvmlDeviceGetTemperatureV(whole, nvml.NVML_TEMPERATURE_GPU),
                lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU),
            ],
            "sm_clock_mhz": [lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM)],
            "throttled": [
                lambda: bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(whole) & _THROTTLED),
                lambda: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(whole) & _THROTTLED),
            ],
        }
        return self._read(readers)

    def errors(self) -> dict[str, float]:
        """Error counters, without what the driver does not report."""
        nvml, gpu = self._nvml, self._whole
        corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        volatile, aggregate = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC
        readers: Mapping[str, Sequence[Reader]] = {
            "ecc_corrected": [lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, corrected, volatile)],
            "ecc_uncorrected": [lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, uncorrected, volatile)],
            "ecc_uncorrected_lifetime": [lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, uncorrected, aggregate)],
            "remapped_rows": [lambda: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2])],
            "row_remap_pending": [lambda: nvml.nvmlDeviceGetRemappedRows(gpu)[2]],
            "row_remap_failure": [lambda: nvml.nvmlDeviceGetRemappedRows(gpu)[3]],
            "pcie_replays": [lambda: nvml.nvmlDeviceGetPcieReplayCounter(gpu)],
            "nvlink_errors": [lambda: _nvlink_errors(nvml, gpu)],
        }
        return self._read(readers)

    def _read(self, readers: Mapping[str, Sequence[Reader]]) -> dict[str, float]:
        found = {}
        for name, variants in readers.items():
            for read in variants:
                try:
                    found[name] = float(read())
                    break
                except Exception as error:  # NVMLError; NVMLLibraryMismatchError, which is none; an older pynvml
                    self.error = error
        return found


def _nvlink_errors(nvml: Any, gpu: Any) -> float:
    fields = nvml.nvmlDeviceGetFieldValues(gpu, list(_NVLINK_FIELDS))
    known = [field.value.ullVal for field in fields if field.nvmlReturn == nvml.NVML_SUCCESS]
    if not known:
        raise LookupError("no NVLink error counters")
    return float(sum(known))


def _text(value: str | bytes) -> str:
    """Older releases of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value

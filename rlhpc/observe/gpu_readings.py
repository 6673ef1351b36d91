"""Readings of this rank's GPU, taken by a thread and summarized for each step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

from rlhpc.core import env
from rlhpc.core.process import observing
from rlhpc.core.shown import ShownOnly
from rlhpc.observe import nvml

READ_SECONDS = 5.0  # between two readings: several in most steps, and NVML's own averages are over a second or less
_ERRORS_SECONDS = 60.0  # error counters change rarely, and reading them takes longer
_CLOSE_SECONDS = 2.0  # a call on a lost GPU may not return
_SINCE_START = ("pcie_replays", "nvlink_errors")  # the driver's counters are older than the run

# Metrics of a step, named by how they are reduced over the ranks, and the readings since the last step.
_MEANS = {
    "utilization_mean": "utilization",
    "utilization_min": "utilization",
    "power_watts_mean": "power_watts",
    "power_limit_watts_min": "power_limit_watts",
    "sm_clock_mhz_mean": "sm_clock_mhz",
    "sm_clock_mhz_min": "sm_clock_mhz",
    "throttled_fraction_max": "throttled",
}
_MAXIMA = ("memory_used_gib", "power_watts", "temperature")


class _Window:
    """Mean and maximum of each reading in an interval."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, float, float]] = {}  # count, sum, maximum

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            count, total, highest = self._values.get(name, (0, 0.0, value))
            self._values[name] = count + 1, total + value, max(highest, value)

    def metrics(self) -> dict[str, float]:
        values = self._values
        found = {name: values[of][1] / values[of][0] for name, of in _MEANS.items() if of in values}
        return found | {f"{name}_max": values[name][2] for name in _MAXIMA if name in values}


class GpuReadings:
    """Reads a GPU every ``period`` seconds. A failure is reported once if ``warns``, and never ends the run."""

    def __init__(self, name: nvml.DeviceName, period: float, *, warns: bool = True) -> None:
        self._name, self._period = name, period
        self._guard = ShownOnly("readings of the GPU")
        self._guard.failed = not warns
        self._over, self._lock = threading.Event(), threading.Lock()
        self._window, self._taken = _Window(), False
        self._errors: dict[str, float] = {}
        self._first_errors: dict[str, float] = {}
        self._errors_at = -_ERRORS_SECONDS
        self._energy: list[float] = []  # counter at the end of the last step, and now
        self._thread = threading.Thread(target=self._run, name="GPU readings", daemon=True)
        self._thread.start()

    @classmethod
    def of_rank(cls, period: float = READ_SECONDS, *, warns: bool) -> GpuReadings | None:
        """Readings of the current CUDA device; None without one."""
        import torch

        if not torch.cuda.is_available():
            return None
        index = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", "")
        return cls(nvml.DeviceName(str(uuid), os.environ.get(env.CUDA_VISIBLE_DEVICES), index), period, warns=warns)

    def take(self) -> dict[str, float]:
        """Metrics since the last call, or of the newest reading if there is none since then. A contributor to the
        numbers of all ranks."""
        with self._lock:
            self._taken = True
            found = {**self._window.metrics(), **{f"{name}_max": value for name, value in self._errors.items()}}
            if self._energy:
                before, now = self._energy
                found["energy_joules_sum"], self._energy = now - before, [now, now]
        return {f"gpu/{name}": value for name, value in found.items()}

    def close(self) -> None:
        """Ends the thread, unless NVML hangs."""
        self._over.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        with self._guard:
            loaded = nvml.load()
            gpu = nvml.NvmlDevice(loaded, nvml.find(loaded, self._name))
            while True:
                with self._guard, observing():
                    self._read(gpu)
                if self._over.wait(self._period):
                    break
            loaded.nvmlShutdown()

    def _read(self, gpu: nvml.NvmlDevice) -> None:
        state, errors = gpu.state(), dict[str, float]()
        if time.monotonic() >= self._errors_at + _ERRORS_SECONDS:
            errors, self._errors_at = gpu.errors(), time.monotonic()
        for name in _SINCE_START:
            if name in errors:
                errors[name] -= self._first_errors.setdefault(name, errors[name])
        with self._lock:
            if self._taken or not state:  # a GPU that is lost has no readings, rather than old ones
                self._window, self._taken = _Window(), False
            if "energy_joules" in state:
                now = state.pop("energy_joules")
                self._energy = [self._energy[0] if self._energy else now, now]
            self._window.add(state)
            self._errors |= errors
        if not state:
            raise RuntimeError(f"{gpu.error}")

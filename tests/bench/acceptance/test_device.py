"""GPU facts from the driver, through a fake pynvml."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from bench.acceptance.machine import read_fingerprint, read_gpu, used_memory
from rlhpc.core import env


class NVMLError(Exception):
    pass


def nvml(**calls: object) -> SimpleNamespace:
    """A fake pynvml with two GPUs, whose handles are their indices."""

    def handle(index: int) -> int:
        if index > 1:
            raise NVMLError("invalid argument")
        return index

    names = ("NVIDIA H100 80GB HBM3", b"NVIDIA H200")
    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetName": lambda at: names[at],
        "nvmlDeviceGetMemoryInfo": lambda at: SimpleNamespace(total=(80 + 61 * at) << 30, used=(at + 1) << 30),
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetMaxClockInfo": lambda at, clock: {"sm": 1980, "memory": 2619}[clock],
        "nvmlDeviceGetEnforcedPowerLimit": lambda at: 700_000,
        "NVML_CLOCK_SM": "sm",
        "NVML_CLOCK_MEM": "memory",
        "NVMLError": NVMLError,
    }
    return SimpleNamespace(**{**functions, **calls})


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv(env.CUDA_VISIBLE_DEVICES, raising=False)


def test_a_machine_without_a_driver_has_a_fingerprint() -> None:
    assert used_memory() is None
    found = read_fingerprint(1)
    assert (found.gpu, found.slug) == ("unknown GPU", "unknown-gpu")
    assert read_fingerprint(0).slug == "cpu"
    assert found.cpu_memory_gib > 0.1


def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert read_gpu() == {
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpu_memory_gib": 80.0,
        "driver": "580.95.05",
        "driver_cuda": "13.1",
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "power_limit_watts": 700.0,
    }
    assert used_memory() == 1 << 30


@pytest.mark.parametrize(
    ("visible", "name"), [("1", "NVIDIA H200"), ("1,0", "NVIDIA H200"), ("7", "unknown GPU"), ("", "unknown GPU")]
)
def test_the_first_visible_gpu_is_meant(visible: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setenv(env.CUDA_VISIBLE_DEVICES, visible)
    assert read_gpu()["gpu"] == name


def test_what_a_board_does_not_report_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NVMLError("not supported")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetEnforcedPowerLimit=refuse))
    assert "power_limit_watts" not in read_gpu()
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refuse))
    assert read_gpu() == {"gpu": "unknown GPU"}

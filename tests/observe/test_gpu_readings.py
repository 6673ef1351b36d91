"""Readings of a GPU: the real pynvml in processes of their own, with a driver's library built by the C compiler."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.core import env
from rlhpc.observe.gpu_readings import GpuReadings
from rlhpc.observe.nvml import DeviceName
from rlhpc.observe.rank_numbers import RankNumbers
from tests.docs.pages import DOCS, table_names
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda

HERE = Path(__file__).parent
UUID = "0b0b0b0b-1111-2222-3333-444444444444"  # of the fake's second GPU
STATE = {
    "utilization": 0.71,
    "memory_used_gib": 41.0,
    "power_watts": 601.0,
    "power_limit_watts": 700.0,
    "temperature": 66.0,
    "sm_clock_mhz": 1755.0,
    "throttled": 0.0,
}
ERRORS = {
    "ecc_corrected": 1.0,
    "ecc_uncorrected": 11.0,
    "ecc_uncorrected_lifetime": 111.0,
    "remapped_rows": 3.0,
    "row_remap_pending": 1.0,
    "row_remap_failure": 0.0,
    "pcie_replays": 7.0,
    "nvlink_errors": 12.0,
}


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a driver's library of today, and with an older one."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    found = {}
    for name, options in (("new", []), ("old", ["-DOLD"])):
        found[name] = tmp_path_factory.mktemp(name)
        library = found[name] / "libnvidia-ml.so.1"
        command = [
            compiler,
            "-w",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libnvidia-ml.so.1",
            *options,
            str(HERE / "fake_nvml.c"),
            "-o",
            str(library),
        ]
        subprocess.run(command, check=True)
    return found


def child(driver: Path | None, program: str, **settings: str) -> Any:
    """What a program prints as JSON, in a process that finds the driver's library."""
    environment = {**os.environ, **settings, env.LD_LIBRARY_PATH: str(driver or "")}
    code = f"import json, os\nfrom rlhpc.observe import nvml\n{program}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


OPEN = f"""
driver = nvml.load()
gpu = nvml.NvmlDevice(driver, nvml.find(driver, nvml.DeviceName({UUID!r}, None, 0)))
"""


def test_everything_is_read(drivers: dict[str, Path]) -> None:
    state, errors = child(drivers["new"], f"{OPEN}\nprint(json.dumps([gpu.state(), gpu.errors()]))")
    assert state.pop("energy_joules") > 5e6
    assert state == STATE
    assert errors == ERRORS


def test_an_older_driver_lacks_some(drivers: dict[str, Path]) -> None:
    state, errors = child(drivers["old"], f"{OPEN}\nprint(json.dumps([gpu.state(), gpu.errors()]))")
    state.pop("energy_joules")
    assert state == {**STATE, "temperature": 61.0}
    lacking = ("remapped_rows", "row_remap_pending", "row_remap_failure", "nvlink_errors")
    assert errors == {name: value for name, value in ERRORS.items() if name not in lacking}


CALLS = {  # name of NVML: what is lost with it
    "nvmlDeviceGetUtilizationRates": {"utilization"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_gib"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_joules"},
    "nvmlDeviceGetTemperatureV": set(),  # the older function reads it
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": set(),
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected", "ecc_uncorrected_lifetime"},
    "nvmlDeviceGetRemappedRows": {"remapped_rows", "row_remap_pending", "row_remap_failure"},
    "nvmlDeviceGetPcieReplayCounter": {"pcie_replays"},
    "nvmlDeviceGetFieldValues": {"nvlink_errors"},
}
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 4, 13, 15


def test_each_call_fails_by_itself(drivers: dict[str, Path]) -> None:
    program = f"""{OPEN}
found = {{}}
for name in {list(CALLS)!r}:
    for code in {(NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST)!r}:
        os.environ["FAKE_NVML_FAIL"] = f"{{name}}:{{code}}"
        found[f"{{name}} {{code}}"] = sorted({{**gpu.state(), **gpu.errors()}})
os.environ["FAKE_NVML_FAIL"] = "ALL:15"
found["lost"] = [sorted(gpu.state()), str(gpu.error)]
del os.environ["FAKE_NVML_FAIL"]

def mismatch(handle):  # as pynvml raises it for a function without a version
    raise driver.NVMLLibraryMismatchError("Unversioned function called")

driver.nvmlDeviceGetMemoryInfo = mismatch
found["mismatch"] = sorted(gpu.state())
print(json.dumps(found))
"""
    found = child(drivers["new"], program)
    everything = {*STATE, *ERRORS, "energy_joules"}
    assert found.pop("lost") == [[], "GPU is lost"]
    assert found.pop("mismatch") == sorted({*STATE, "energy_joules"} - {"memory_used_gib"})
    assert len(found) == 4 * len(CALLS)
    for case, names in found.items():
        assert set(names) == everything - CALLS[case.split()[0]], case


def test_each_rank_finds_its_own_gpu(drivers: dict[str, Path]) -> None:
    """By CUDA's UUID, an index, a UUID or its first characters, or a MIG device; never another one."""
    first, second, mig = (f"{kind}{at * 4}-1111-2222-3333-444444444444" for kind, at in
                          (("GPU-", "0a"), ("GPU-", "0b"), ("MIG-", "0c")))  # fmt: skip
    cases = [
        (("", None, 1), second),
        (("", "1,0", 0), second),
        (("", "1,0", 1), first),
        ((UUID, "0,1", 0), second),  # CUDA's order is not NVML's
        ((f"GPU-{UUID}", "0,1", 0), second),
        ((UUID.upper(), "0", 0), ""),
        (("", f"{first},{second}", 1), second),
        (("", "GPU-0b0b", 0), second),
        (("", "GPU-ffff", 0), ""),
        (("", mig, 0), mig),
        ((UUID, mig, 0), mig),
        ((mig.removeprefix("MIG-"), "0", 0), mig),
        (("", "0", 3), ""),
        (("", "", 0), ""),
        (("", None, 5), ""),
    ]
    program = f"""
driver, found = nvml.load(), []
for case in {[case for case, _ in cases]!r}:
    try:
        found.append(driver.nvmlDeviceGetUUID(nvml.find(driver, nvml.DeviceName(*case))))
    except LookupError as error:
        assert "NVML does not know the GPU" in str(error)
        found.append("")
gpu = nvml.NvmlDevice(driver, nvml.find(driver, nvml.DeviceName("", {mig!r}, 0)))
print(json.dumps([found, gpu.state(), gpu.errors()]))
"""
    found, state, errors = child(drivers["new"], program)
    assert found == [expected for _, expected in cases]
    assert "utilization" not in state  # of the whole GPU, with other devices on it
    assert (state["memory_used_gib"], state["power_watts"], errors["ecc_uncorrected"]) == (1, 601, 11)


def test_throttling_is_by_hardware_or_heat(drivers: dict[str, Path]) -> None:
    """Not by a GPU that is idle, by clocks that are set, or by the power limit, which is normal under load."""
    cases = {0: 0, 0x01: 0, 0x02: 0, 0x04: 0, 0x10: 0, 0x08: 1, 0x20: 1, 0x40: 1, 0x80: 1, 0x44: 1}
    program = f"""{OPEN}
found = {{}}
for reasons in {list(cases)!r}:
    os.environ["FAKE_NVML_REASONS"] = str(reasons)
    found[reasons] = gpu.state()["throttled"]
print(json.dumps(found))
"""
    assert child(drivers["new"], program) == {str(reasons): throttled for reasons, throttled in cases.items()}


def test_a_step_has_mean_and_maximum_since_the_last_one(drivers: dict[str, Path]) -> None:
    program = f"""{OPEN}
import contextlib, time
from rlhpc.observe import gpu_readings
gpu_readings._ERRORS_SECONDS = 0.0
readings = gpu_readings.GpuReadings(nvml.DeviceName({UUID!r}, None, 0), 1000.0)
while not (first := readings.take()):
    time.sleep(0.01)
readings._read(gpu)
os.environ |= {{"FAKE_NVML_WATTS": "300", "FAKE_NVML_UTILIZATION": "10", "FAKE_NVML_REASONS": "8"}}
os.environ |= {{"FAKE_NVML_REPLAYS": "9", "FAKE_NVML_LINK_ERRORS": "5"}}
readings._read(gpu)
both, none = readings.take(), readings.take()
readings._read(gpu)
later = readings.take()
os.environ["FAKE_NVML_FAIL"] = "ALL:15"
with contextlib.suppress(RuntimeError):
    readings._read(gpu)
lost = readings.take()
del os.environ["FAKE_NVML_FAIL"]
readings._read(gpu)
again = readings.take()
readings.close()
print(json.dumps([first, both, none, later, lost, again, readings._thread.is_alive()]))
"""
    first, both, none, later, lost, again, alive = child(drivers["new"], program)
    since_start = {"pcie_replays": 0.0, "nvlink_errors": 0.0}
    assert {name: first[f"gpu/{name}_max"] for name in ERRORS} == {**ERRORS, **since_start}
    assert first["gpu/utilization_mean"] == first["gpu/utilization_min"] == 0.71
    assert (first["gpu/power_limit_watts_min"], first["gpu/temperature_max"]) == (700, 66)
    assert first["gpu/throttled_fraction_max"] == 0
    assert (both["gpu/power_watts_max"], both["gpu/power_watts_mean"]) == (601, 450.5)
    assert (both["gpu/throttled_fraction_max"], both["gpu/energy_joules_sum"]) == (0.5, 20)
    assert none == {**both, "gpu/energy_joules_sum": 0}  # a step shorter than the period
    assert (later["gpu/power_watts_mean"], later["gpu/utilization_min"]) == (300, 0.1)
    assert (later["gpu/throttled_fraction_max"], later["gpu/temperature_max"]) == (1, 66)
    assert (later["gpu/pcie_replays_max"], later["gpu/nvlink_errors_max"]) == (2, 3)
    assert "gpu/utilization_mean" not in lost
    assert again["gpu/power_watts_max"] == 300
    assert not alive


@pytest.mark.parametrize("warns", [True, False])
def test_one_line_reports_that_nvml_fails(drivers: dict[str, Path], warns: bool) -> None:
    cases = {"no GPU": ("ffff", ""), "lost": (UUID, "ALL:15"), "init": (UUID, "nvmlInitWithFlags:4")}
    program = f"""
import contextlib, io
from rlhpc.observe.gpu_readings import GpuReadings
err, found = io.StringIO(), {{}}
with contextlib.redirect_stderr(err):
    for case, (uuid, fail) in {cases!r}.items():
        os.environ["FAKE_NVML_FAIL"] = fail
        readings = GpuReadings(nvml.DeviceName(uuid, None, 0), 0.01, warns={warns})
        readings.close()  # after the first reading
        found[case] = readings.take()
print(json.dumps([err.getvalue(), found]))
"""
    shown, found = child(drivers["new"], program)
    lines = [f"rlhpc: warning: continuing without readings of the GPU, which failed: {reason}" for reason in
             ("LookupError: NVML does not know the GPU ffff", "RuntimeError: GPU is lost",
              "NVMLError_NoPermission: Insufficient Permissions")]  # fmt: skip
    assert shown.splitlines() == (lines if warns else [])
    assert {name.rpartition("/")[2] for values in found.values() for name in values} <= {f"{n}_max" for n in ERRORS}


def test_a_machine_without_the_library_or_pynvml_is_named() -> None:
    program = """
import sys
try:
    nvml.load()
except Exception as error:
    first = str(error)
sys.modules["pynvml"] = None
try:
    nvml.load()
except LookupError as error:
    print(json.dumps([first, str(error)]))
"""
    missing, no_package = child(None, program)
    assert missing == "NVML Shared Library Not Found"
    assert no_package == "pynvml is missing; install nvidia-ml-py"


def test_a_cpu_has_no_readings_and_a_gpu_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuReadings.of_rank(1.0, warns=True) is None
    monkeypatch.setenv(env.CUDA_VISIBLE_DEVICES, "3,4")
    with FakeCuda(devices=2):
        torch.cuda.set_device(1)
        readings = GpuReadings.of_rank(1.0, warns=False)
    assert readings is not None
    readings.close()
    assert readings._name == DeviceName("", "3,4", 1)
    assert readings.take() == {}


def _gathered(library: Path) -> dict[str, float]:
    """A step's metrics of two ranks, each of which sees both GPUs."""
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # found by its name from now on
    rank, numbers = int(os.environ[env.RANK]), RankNumbers()
    with FakeCuda(devices=2):
        torch.cuda.set_device(rank)
        readings = GpuReadings.of_rank(1000.0, warns=True)
    assert readings is not None
    numbers.add("readings of the GPU", readings.take, None)
    readings.close()
    return numbers.gather().metrics()


@pytest.mark.ranks
def test_a_step_names_the_rank_of_the_worst_gpu(drivers: dict[str, Path]) -> None:
    first, second = run_ranks(_gathered, 2, drivers["new"] / "libnvidia-ml.so.1")
    assert first == second
    assert (first["gpu/power_watts_mean"], first["gpu/utilization_mean"]) == (600.5, pytest.approx(0.705))
    assert (first["gpu/power_watts_max"], first["gpu/power_watts_max_rank"]) == (601, 1)
    assert (first["gpu/utilization_min"], first["gpu/utilization_min_rank"]) == (0.7, 0)
    assert (first["gpu/ecc_uncorrected_max"], first["gpu/ecc_uncorrected_max_rank"]) == (11, 1)
    assert first["gpu/energy_joules_sum"] == 0  # one reading each
    names = {name for name in first if not name.endswith("_rank")}
    page = {name for table in table_names(DOCS / "metrics.md") for name in table if name.startswith("gpu/")}
    assert names == page


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_is_read() -> None:
    readings = GpuReadings.of_rank(0.2, warns=True)
    assert readings is not None
    values, ends = torch.randn(4096, 4096, device="cuda"), time.monotonic() + 5
    while time.monotonic() < ends:
        values = torch.nn.functional.normalize(values @ values)
        torch.cuda.synchronize()
    found = readings.take()
    readings.close()
    assert found["gpu/utilization_mean"] > 0.5
    assert 50 < found["gpu/power_watts_mean"] <= found["gpu/power_watts_max"] < 1500
    assert 20 < found["gpu/temperature_max"] < 110
    assert found["gpu/memory_used_gib_max"] > 0.1
    assert found["gpu/energy_joules_sum"] > 100
    assert 0 <= found["gpu/throttled_fraction_max"] <= 1

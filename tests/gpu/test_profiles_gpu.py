"""Tools for profiles on a real GPU: traces with kernels, memory snapshots, NVTX ranges, Nsight Systems."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhpc.core.folder import RunFolder
from rlhpc.core.profiles import Selection
from rlhpc.launch.worker.nsys import nsys_command
from rlhpc.observe.profiles.index import read_profiles
from rlhpc.observe.profiles.recorder import Recorder
from rlhpc.observe.profiles.table import read_trace, trace_table
from rlhpc.observe.profiles.tools import MemorySnapshots
from tests.helpers.profiles import Profiled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CAPTURE = """
import torch
from pathlib import Path
from rlhpc.observe.profiles.tools import CaptureRange
tool = CaptureRange(Path("x"))
values = torch.ones(64, 64, device="cuda")
for number in range(2):
    tool.start(Path(f"step-{number}"))
    values @ values
    torch.cuda.synchronize()
    tool.stop()
"""


def test_a_step_has_kernels_ranges_and_a_snapshot(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    layer = torch.nn.Linear(64, 64, device="cuda")
    recorder = Recorder(attempt, 0, 2**30, Profiled({"actor.layers.0": layer}))
    recorder.passed(3)
    recorder.begin(Selection(3, 3, tools=("torch", "memory", "nvtx")))
    recorder.enter("update")
    layer(torch.ones(64, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    recorder.leave("update")
    recorder.end()
    recorder.write(2**30)
    (found,) = read_profiles(attempt.run)
    assert found.warnings == ()
    assert {file.name for file in found.files} == {"rank-00000.trace.json.gz", "rank-00000.memory.pickle"}
    assert trace_table(read_trace(found.traces[0])).device == "gpu"
    with open(attempt.run.profile(3) / "rank-00000.memory.pickle", "rb") as file:
        assert pickle.load(file)["segments"]


def test_an_out_of_memory_error_leaves_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001" / "rank-00000.out-of-memory.pickle"
    MemorySnapshots().watch(lambda: path)
    kept = torch.ones(1 << 20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    with open(path, "rb") as file:
        assert pickle.load(file)["segments"]
    assert kept.sum() == 1 << 20


@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs Nsight Systems")
def test_nsight_systems_makes_a_report_of_each_range(tmp_path: Path) -> None:
    program = shutil.which("nsys")
    assert program is not None
    command = nsys_command(program, tmp_path / "rank-00000", [sys.executable, "-c", CAPTURE])
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    assert len(list(tmp_path.glob("rank-00000*.nsys-rep"))) == 2

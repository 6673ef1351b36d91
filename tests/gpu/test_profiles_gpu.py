"""Tools for profiles on a real GPU: traces with kernels, memory snapshots, NVTX ranges, Nsight Systems."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhpc.core.folder import RunFolder
from rlhpc.launch.worker.nsys import nsys_command
from rlhpc.observe.profiles import StepProfile

pytestmark = pytest.mark.gpu
CAPTURE = """
import torch
from pathlib import Path
from rlhpc.core.folder import RunFolder
from rlhpc.observe.profiles import StepProfile
values = torch.ones(64, 64, device="cuda")
profile = StepProfile(RunFolder(Path("run")), 0, ("nsys",), torch.cuda.synchronize)
for step in range(2):
    profile.begin(step)
    values @ values
    profile.end()
"""


def test_a_step_has_kernels_ranges_and_a_snapshot(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    layer = torch.nn.Linear(64, 64, device="cuda")
    profile = StepProfile(run, 0, ("torch", "memory"), torch.cuda.synchronize)
    profile.begin(3)
    profile.enter("update")
    layer(torch.ones(64, 64, device="cuda")).sum().backward()
    profile.leave()
    profile.end()
    profile.write()
    names = ["rank-00000.memory.pickle", "rank-00000.trace.json.gz", "rank-00000.txt"]
    assert sorted(file.name for file in run.profile(3).iterdir()) == names
    events = json.loads(gzip.decompress((run.profile(3) / names[1]).read_bytes()))["traceEvents"]
    assert "kernel" in {event.get("cat") for event in events}
    assert "rlhpc:update" in (run.profile(3) / names[2]).read_text()
    assert pickle.loads((run.profile(3) / names[0]).read_bytes())["segments"]


def test_an_out_of_memory_error_leaves_a_snapshot(tmp_path: Path) -> None:
    StepProfile(RunFolder(tmp_path), 0, ("memory",), torch.cuda.synchronize)
    kept = torch.ones(1 << 20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    file = RunFolder(tmp_path).profiles / "rank-00000.out-of-memory.pickle"
    assert pickle.loads(file.read_bytes())["segments"]
    assert kept.sum() == 1 << 20


@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs Nsight Systems")
def test_nsight_systems_makes_a_report_of_each_range(tmp_path: Path) -> None:
    program = shutil.which("nsys")
    assert program is not None
    command = nsys_command(program, tmp_path / "rank-00000", [sys.executable, "-c", CAPTURE])
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    assert len(list(tmp_path.glob("rank-00000*.nsys-rep"))) == 2

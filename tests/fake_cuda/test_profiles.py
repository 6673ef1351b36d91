"""Profile of a rank's step on a GPU: all tools."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from rlhpc.core.folder import RunFolder
from rlhpc.observe.profiles import StepProfile
from tests.helpers.fake_cuda import FakeCuda

pytestmark = pytest.mark.heavy


def test_tables_have_kernels_the_longest_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with FakeCuda():
        profile = StepProfile(run, 0, ("torch",), lambda: None)
        profile.begin(3)
        torch.ones(3).add(1)
        torch.ones(300, 300) @ torch.ones(300, 300)
        profile.end()
        profile.write()
    table = (run.profile(3) / "rank-00000.txt").read_text()
    assert table.index("aten::mm_kernel") < table.index("aten::add_kernel")


def test_each_tool_begins_and_ends_with_the_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with FakeCuda() as gpu:
        profile = StepProfile(run, 0, ("memory", "nsys"), lambda: None)
        profile.begin(3)
        profile.enter("update")
        profile.leave()
        profile.end()
        profile.write()
    assert [file.name for file in run.profile(3).iterdir()] == ["rank-00000.memory.pickle"]
    assert [call[:2] for call in gpu.calls if call[0] != "_cuda_attach_out_of_memory_observer"] == [
        ("_record_memory_history",),
        ("cudaProfilerStart",),
        ("range_push", "rlhpc:step 3"),
        ("range_push", "rlhpc:update"),
        ("range_pop",),
        ("range_pop",),
        ("cudaProfilerStop",),
    ]


def test_the_first_out_of_memory_error_leaves_a_snapshot(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with FakeCuda() as gpu:
        StepProfile(run, 2, ("memory",), lambda: None)
        (observer,) = (call[1] for call in gpu.calls if call[0] == "_cuda_attach_out_of_memory_observer")
        observer(0, 1, 2, 3)
        file = run.profiles / "rank-00002.out-of-memory.pickle"
        assert pickle.loads(file.read_bytes()) == {"segments": []}
        file.unlink()
        observer(0, 1, 2, 3)
        assert not file.exists()

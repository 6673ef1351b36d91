"""Profiles of a rank on a GPU: all tools at once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from rlhpc.core.folder import RunFolder
from rlhpc.core.profiles import Selection
from rlhpc.observe.profiles.index import read_profiles
from rlhpc.observe.profiles.recorder import Recorder
from rlhpc.observe.profiles.table import read_trace
from rlhpc.observe.profiles.tools import TorchTrace, missing
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.profiles import Profiled

pytestmark = pytest.mark.heavy
LAYER = torch.nn.Linear(3, 3)


def test_traces_have_kernels(tmp_path: Path) -> None:
    trace = TorchTrace()
    with FakeCuda():
        trace.start(tmp_path / "rank-00000")
        sees_kernels = trace._profile._sees_kernels
        torch.ones(3).add(1)
        trace.stop()
        trace.write()
    assert sees_kernels
    assert "aten::add" in {event["name"] for event in read_trace(tmp_path / "rank-00000.trace.json.gz")}


def test_each_tool_begins_and_ends_with_its_phase(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    tools = ("memory", "nsys", "nvtx")
    with FakeCuda() as gpu:
        assert missing(tools) == ""
        recorder = Recorder(attempt, 0, 2**30, Profiled({"actor.layers.0": LAYER}))
        recorder.passed(3)
        recorder.begin(Selection(3, 3, phases=("update",), tools=tools))
        recorder.enter("update")
        LAYER(torch.ones(3))
        recorder.leave("update")
        recorder.end()
        recorder.write(2**30)
    (found,) = read_profiles(attempt.run)
    assert found.warnings == ()
    assert [file.name for file in found.files] == ["rank-00000.update.memory.pickle", "rank-00000.update.nsys.txt"]
    assert found.files[1].read_text() == f"range 1 of {attempt.nsys_reports(0)}*.nsys-rep\n"
    assert [call[:2] for call in gpu.calls] == [
        ("_record_memory_history",),
        ("cudaProfilerStart",),
        ("range_push", "rlhpc:update"),
        ("range_push", "rlhpc:actor.layers.0"),
        ("range_pop",),
        ("range_pop",),
        ("cudaProfilerStop",),
        ("_record_memory_history",),
    ]


def test_the_first_out_of_memory_error_leaves_a_snapshot(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    with FakeCuda() as gpu:
        recorder = Recorder(attempt, 2, 2**30, Profiled({}))
        recorder.watch_memory()
        (observer,) = (call[1] for call in gpu.calls if call[0] == "_cuda_attach_out_of_memory_observer")
        recorder.passed(5)
        observer(0, 1, 2, 3)
        file = attempt.run.profile(5) / "rank-00002.out-of-memory.pickle"
        assert pickle.loads(file.read_bytes()) == {"segments": []}
        file.unlink()
        observer(0, 1, 2, 3)
        assert not file.exists()
        recorder.begin(Selection(5, 5, tools=("memory",)))
        recorder.end()
    assert gpu.count("_record_memory_history") == 3, "it goes on with the memory in use"

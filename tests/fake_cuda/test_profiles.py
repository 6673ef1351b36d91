"""Profiles of a rank on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhpc.observe.profiles.table import read_trace
from rlhpc.observe.profiles.tools import TorchTrace, missing
from tests.helpers.fake_cuda import FakeCuda

pytestmark = pytest.mark.heavy


def test_traces_have_kernels_and_no_tool_is_missing(tmp_path: Path) -> None:
    trace = TorchTrace()
    with FakeCuda():
        trace.start(tmp_path / "rank-00000")
        assert trace._profile._sees_kernels
        torch.ones(3).add(1)
        trace.stop()
        trace.write()
        assert missing(["torch", "memory", "nsys", "nvtx"]) == ""
    assert "aten::add" in {event["name"] for event in read_trace(tmp_path / "rank-00000.trace.json.gz")}

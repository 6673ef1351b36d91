"""Profile of one rank's step: its files, and tools that fail."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from rlhpc.core.folder import RunFolder
from rlhpc.observe import profiles
from rlhpc.observe.metrics import Stopwatch
from rlhpc.observe.profiles import StepProfile

pytestmark = pytest.mark.heavy  # the first start of torch.profiler takes a second
LAYER = torch.nn.Linear(8, 8)


def record(run: RunFolder, tools: Collection[str] = ("torch",), rank: int = 0) -> torch.Tensor:
    """Step 7 with two phases, one entered twice; returns its result."""
    profile = StepProfile(run, rank, tools, lambda: None)
    profile.begin(7)
    Stopwatch.hook = profile
    clock = Stopwatch()
    try:
        with clock("rollout"):
            values = torch.ones(3, 8)
        for _ in range(2):
            with clock("update"):
                values = LAYER(values)
    finally:
        Stopwatch.hook = None
    profile.end()
    profile.write()
    return values


def files(run: RunFolder) -> set[str]:
    return {file.name for file in run.profile(7).iterdir()}


def test_a_step_is_a_trace_and_a_table_with_its_phases(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, rank=3)
    assert files(run) == {"rank-00003.trace.json.gz", "rank-00003.txt"}
    events = json.loads(gzip.decompress((run.profile(7) / "rank-00003.trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") in ("user_annotation", "cpu_op")]
    assert (names.count("rlhpc:step 7"), names.count("rlhpc:rollout"), names.count("rlhpc:update")) == (1, 1, 2)
    calls = {line.strip().split("  ")[0]: line.split()[-1] for line in _lines(run.profile(7) / "rank-00003.txt")}
    assert (calls["rlhpc:rollout"], calls["rlhpc:update"], calls["aten::linear"]) == ("1", "2", "2")


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if "::" in line or "rlhpc:" in line]


def test_a_resumed_run_replaces_the_profile_of_a_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run)
    before = {name: (run.profile(7) / name).stat().st_ino for name in files(run)}
    record(run)
    assert files(run) == before.keys()
    assert all((run.profile(7) / name).stat().st_ino != inode for name, inode in before.items())


def test_results_are_those_without_a_profile(tmp_path: Path) -> None:
    expected = LAYER(LAYER(torch.ones(3, 8)))
    assert torch.equal(record(RunFolder(tmp_path)), expected)


def test_a_tool_that_fails_is_a_warning_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        record(RunFolder(tmp_path), ("memory", "nsys", "torch"))
    assert files(RunFolder(tmp_path)) == {"rank-00000.trace.json.gz", "rank-00000.txt"}
    warned = [message.split(":")[1].strip() for message in caplog.messages]
    assert set(warned) == {"memory", "nsys", "ranges"}
    assert warned.count("ranges") == 1, "a text is logged once, not in each phase"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFolder(tmp_path)
    run.profiles.write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert record(run).shape == (3, 8)
    assert [message.split(":")[1].strip() for message in caplog.messages] == ["files", "torch"]


def test_a_large_trace_has_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiles, "_LARGEST_TRACE", 1)
    with caplog.at_level(logging.WARNING):
        record(RunFolder(tmp_path))
    assert files(RunFolder(tmp_path)) == {"rank-00000.trace.json.gz"}
    assert "rank-00000.trace.json.gz is too large for a table; open it with https://ui.perfetto.dev" in caplog.text

"""Profiles of one rank: files, bounds, and tools that fail."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch

from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.profiles import Range, Selection
from rlhpc.observe.metrics import Stopwatch
from rlhpc.observe.profiles.index import prune, read_profiles
from rlhpc.observe.profiles.recorder import Recorder
from rlhpc.observe.profiles.stacks import find_py_spy
from rlhpc.observe.profiles.table import read_trace, trace_table
from tests.helpers.profiles import Profiled

pytestmark = pytest.mark.heavy  # the first start of torch.profiler takes a second
LAYER = torch.nn.Linear(8, 8)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    return RunFolder(tmp_path).attempt(1)


def recorder(attempt: AttemptFolder, most: int = 2**30, rank: int = 0) -> Recorder:
    return Recorder(attempt, rank, most, Profiled({"actor.layers.0": LAYER}))


def record(profiles: Recorder, step: int, selection: Selection, *, most: int = 2**30) -> torch.Tensor:
    """A step with two phases, one entered twice; returns its result."""
    profiles.passed(step)
    profiles.begin(selection)
    Stopwatch.hook = profiles
    clock = Stopwatch()
    try:
        with clock("rollout"):
            values = torch.ones(3, 8)
        for _ in range(2):
            with clock("update"):
                values = LAYER(values)
    finally:
        Stopwatch.hook = None
    profiles.end()
    profiles.write(most)
    return values


def names(file: Path) -> set[str]:
    return {event["name"] for event in read_trace(file)}


def test_a_whole_step_is_one_trace_with_phases_and_layers(attempt: AttemptFolder) -> None:
    record(recorder(attempt, rank=3), 7, Selection(7, 7, (Range(3, 3),)))
    (found,) = read_profiles(attempt.run)
    assert (found.step, found.rank, found.warnings) == (7, 3, ())
    assert [file.name for file in found.files] == ["rank-00003.trace.json.gz"]
    assert {"rlhpc:rollout", "rlhpc:update", "rlhpc:actor.layers.0", "aten::linear"} <= names(found.files[0])
    assert {one.name for one in trace_table(read_trace(found.files[0])).shares} == {"all", "rollout", "update"}


def test_of_chosen_phases_nothing_else_is_recorded(attempt: AttemptFolder) -> None:
    record(recorder(attempt), 7, Selection(7, 7, phases=("update",)))
    (found,) = read_profiles(attempt.run)
    assert [file.name for file in found.files] == [
        "rank-00000.update-2.trace.json.gz",
        "rank-00000.update.trace.json.gz",
    ]
    for file in found.files:
        assert "rlhpc:update" in names(file)
        assert "aten::ones" not in names(file)


def test_results_are_those_without_a_profile_and_nothing_stays(attempt: AttemptFolder) -> None:
    expected = LAYER(LAYER(torch.ones(3, 8)))
    assert torch.equal(record(recorder(attempt), 7, Selection(7, 7)), expected)
    assert not LAYER._forward_hooks
    assert not LAYER._forward_pre_hooks


def test_a_tool_that_fails_is_a_warning_and_the_others_continue(
    attempt: AttemptFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        record(recorder(attempt), 7, Selection(7, 7, tools=("memory", "nvtx", "nsys", "torch")))
    (found,) = read_profiles(attempt.run)
    assert len(found.traces) == 1
    assert {warning.partition(":")[0] for warning in found.warnings} == {"memory", "nsys", "ranges"}
    assert caplog.text.count("profile of step 7: memory: ") == 1


def test_files_beyond_the_rank_s_share_are_not_kept(attempt: AttemptFolder) -> None:
    record(recorder(attempt), 7, Selection(7, 7, phases=("rollout", "update")), most=1)
    (found,) = read_profiles(attempt.run)
    assert found.files == ()
    assert len(found.warnings) == 3
    assert "choose profile.phases, fewer profile.ranks or a higher profile.max_mib" in found.warnings[0]


def test_the_oldest_steps_are_deleted_for_new_ones(attempt: AttemptFolder) -> None:
    run = attempt.run
    for step in (5, 1, 3):  # in the order of their times; 1 again after 5, as in a resumed run
        folder = run.profile(step)
        folder.mkdir(parents=True)
        (folder / "rank-00000.trace.json.gz").write_bytes(b"x" * 1000)
        age = time.time() - 100 + [5, 1, 3].index(step)
        os.utime(folder, (age, age))
    prune(run, 2000, newest=9)
    assert sorted(path.name for path in run.profiles.iterdir()) == ["step-00000001", "step-00000003"]
    prune(run, 0, newest=3)
    assert [path.name for path in run.profiles.iterdir()] == ["step-00000003"]


def test_stacks_of_this_process_by_py_spy(attempt: AttemptFolder) -> None:
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    profiles = recorder(attempt)
    selection = Selection(7, 7, phases=("update",), tools=("py-spy",))
    profiles.passed(7)
    profiles.begin(selection)
    profiles.enter("update")
    deadline = time.monotonic() + 60
    file = attempt.run.profile(7) / "rank-00000.update.stacks.txt"
    while not (file.exists() and "wait_in_this_test" in file.read_text()):
        assert time.monotonic() < deadline, file.read_text() if file.exists() else "no file"
        wait_in_this_test()
    profiles.leave("update")
    profiles.end()
    profiles.write(2**30)
    (found,) = read_profiles(attempt.run)
    assert found.warnings == ()
    assert [path.name for path in found.files] == [file.name]
    assert file.read_text().startswith("--- 0.0")


def wait_in_this_test() -> None:
    time.sleep(0.05)


def test_a_record_that_is_not_whole_is_left_out(attempt: AttemptFolder) -> None:
    folder = attempt.run.profile(2)
    folder.mkdir(parents=True)
    for text in ('{"step": 2', "[]", json.dumps({"step": 2, "rank": 0})):
        (folder / "rank-00000.json").write_text(text)
        assert read_profiles(attempt.run) == []

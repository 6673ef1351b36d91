"""Hangs of real runs: a stopped engine is named as the rank at fault, and every group outlives the diagnosis."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.attempts import saved_steps
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run import run_here
from tests.helpers.runs import finish, records, start, write_config
from tests.helpers.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]


def test_a_stopped_engine_is_named(tmp_path: Path) -> None:
    file = write_config(
        tmp_path,
        resources__ranks_per_node=3,
        placement="separate",
        rollout__ranks=2,
        sft__steps=1,
        train__steps=10_000,
        train__prompts_per_step=8,
        validation__every=10_000,
        recovery={"hang": "stop", "hang_timeout_seconds": 60},  # longer than an engine takes to start on a busy machine
    )
    run, process = RunFolder(tmp_path / "run"), start(file)

    def has_steps() -> bool:
        return process.poll() is not None or any(record["step"] > 2 for record in records(run.path))

    until(has_steps, "a few steps", seconds=600)
    assert process.poll() is None, process.communicate()[0]
    attempt = run.attempt(1)
    os.kill(read_starts(attempt.exits)[2].process.pid, signal.SIGSTOP)
    code, output = finish(process)
    assert code == 1, output
    assert "rank 2 (engine 1) on " in output
    assert "does not answer" in output
    assert "; the trainers wait for the engines" in output
    rows = (attempt.heartbeats / "hang.txt").read_text().splitlines()
    assert [row.split()[1] for row in rows if row[:1].isdecimal()] == ["trainer", "engine", "engine"]


LIMIT = 7200.0


@pytest.fixture(scope="module", params=["megatron", "fsdp"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with an engine over both ranks, whose checkpoints are due at once, and written in the background."""
    folder = tmp_path_factory.mktemp(request.param)
    changes: dict[str, Any] = {"actor__parallel__tp": 2} if request.param == "megatron" else {}
    file = write_config(
        folder,
        **changes,
        train__backend=request.param,
        resources__ranks_per_node=2,
        rollout__tp=2,
        sft__steps=1,
        train__steps=2,
        checkpoint={"every": 0, "every_minutes": 1e-6, "keep": 10, "asynchronous": True},
        recovery={"hang_timeout_seconds": LIMIT},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        assert run_here(load_config(file), entry="tests.parallel.group_timeouts:run") == 0
    return RunFolder(folder / "run")


def test_every_group_of_a_run_outlives_a_hang(finished: RunFolder) -> None:
    """Those of layouts, meshes, engines, and checkpoints that are written in the background."""
    for rank in (0, 1):
        found = json.loads((finished.path / f"timeouts-{rank}.json").read_text())
        assert len(found) > 5, found
        assert {*found.values()} == {LIMIT + 86400.0}, found


def test_steps_are_saved_by_time(finished: RunFolder) -> None:
    assert saved_steps(finished) == (1, 2, 3)

"""Whole runs of two ranks: every group outlives a hang, which the hang watch diagnoses, and steps are saved by time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.attempts import saved_steps
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run import run_here
from tests.helpers.runs import write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]

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

"""A rank that does not come is a hang, which is diagnosed before any group of a run ends: whole runs, every group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.launch.runs.run import run_here
from tests.helpers.runs import write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]

LIMIT = 7200.0


@pytest.mark.parametrize("back_end", ["megatron", "fsdp"])
def test_every_group_of_a_run_outlives_a_hang(tmp_path: Path, back_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of layouts, meshes, an engine over both ranks, and checkpoints that are written in the background."""
    changes: dict[str, Any] = {"actor__parallel__tp": 2} if back_end == "megatron" else {}
    file = write_config(
        tmp_path,
        **changes,
        train__backend=back_end,
        resources__ranks_per_node=2,
        rollout__tp=2,
        train__steps=2,
        checkpoint__every=1,
        checkpoint__asynchronous=True,
        recovery={"hang_timeout_seconds": LIMIT},
    )
    monkeypatch.chdir(Path(__file__).parents[2])
    assert run_here(load_config(file), entry="tests.parallel.group_timeouts:run") == 0
    for rank in (0, 1):
        found = json.loads((tmp_path / "run" / f"timeouts-{rank}.json").read_text())
        assert len(found) > 5, found
        assert {*found.values()} == {LIMIT + 86400.0}, found

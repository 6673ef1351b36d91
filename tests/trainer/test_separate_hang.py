"""A stopped engine of a real run is named as the rank at fault: trainers and the other engine only wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
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
        recovery={"hang_timeout_seconds": 60},  # longer than an engine takes to start on a busy machine
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

"""An engine is killed or stopped while it generates: training goes on without it, in the same process, and it comes
back. A replay of the record is equal bit for bit, of one that has left virtual time, with deltas, too."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.engine_losses import read_engines
from rlhpc.rollout.generator.record import read_record
from tests.helpers.runs import complete, finish, records, start
from tests.helpers.waiting import until
from tests.trainer.test_arrival import arrival
from tests.trainer.test_separate import PROMPTS, last_checkpoint, steps_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

ELASTIC: dict[str, Any] = {
    "recovery__lost_engines": "rejoin",
    "recovery__wait_seconds": 0.1,
    "recovery__engine_timeout_seconds": 10,
    "checkpoint__every": 0,
    "train__steps": 2000,
}
# An engine that comes back has no base: it gets its first weights in full. Each version is compared by checksums.
WITH_DELTAS = {"model__dtype": "bfloat16", "reshard__delta": "compressed", "reshard__verify": "always"}


@pytest.mark.parametrize(
    ("schedule", "how"),
    [("arrival", signal.SIGKILL), pytest.param("deterministic", signal.SIGSTOP, marks=pytest.mark.long)],
)
def test_training_goes_on_without_an_engine_which_comes_back(
    tmp_path: Path, schedule: str, how: signal.Signals
) -> None:
    keys = {**ELASTIC, **(WITH_DELTAS if schedule == "deterministic" else {}), "asynchrony__schedule": schedule}
    config = arrival(tmp_path / "one", **keys)
    process, folder = start(config), RunFolder(tmp_path / "one" / "run")

    def reach(step: int) -> None:
        until(lambda: process.poll() is not None or newest_step(folder) >= step, f"step {step}", seconds=300)
        assert process.poll() is None, process.communicate()[0]

    reach(2)
    trainer = process_of(folder, 0)
    os.kill(process_of(folder, 2), how)
    until(lambda: process.poll() is not None or is_back(folder), "the engine's return", seconds=300)
    reach(newest_step(folder) + 2)
    assert process_of(folder, 0) == trainer
    process.send_signal(signal.SIGINT)  # saves and ends
    code, output = finish(process)
    assert code == 130, output
    assert re.search(r"engine 1 on \S+ was lost", output)

    batches = read_record(folder).batches
    groups = [group for step in sorted(batches) for group in batches[step].kept]
    assert len(groups) == len(set(groups)) == PROMPTS * len(batches)
    assert all(r["sampling/staleness_max"] <= 1 for r in steps_of(tmp_path / "one"))
    known = read_engines(folder.attempt(1))
    assert known is not None
    assert known.losses == 1
    assert [state.generation for state in known.engines] == [0, 1]
    if schedule == "arrival":
        return
    output = complete(config, "--resume", f"train.steps={len(batches) + 2}")
    assert "goes on in the order of arrival" in output
    batches = read_record(folder).batches
    again = arrival(tmp_path / "again", **{**keys, "train__steps": len(batches)})
    complete(again, "--replay", str(folder.path))
    assert last_checkpoint(tmp_path / "again") == last_checkpoint(tmp_path / "one")


def newest_step(folder: RunFolder) -> int:
    return max((record["step"] for record in records(folder.path) if record["phase"] == "rl"), default=0)


def process_of(folder: RunFolder, rank: int) -> int:
    file = folder.attempt(1).exits / f"rank-{rank:05d}.start.json"
    return int(json.loads(file.read_text())["process"]["pid"])


def is_back(folder: RunFolder) -> bool:
    """Whether the second engine has generated after it was started again."""
    lives = read_record(folder).lives.get(1, [])
    return len(lives) > 1 and any(act.kind == "admit" for act in lives[1])

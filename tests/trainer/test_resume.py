"""kill -9 of a rank: the run goes on, and every step's loss is bit-equal to that of an undisturbed run. Its steps carry
over surplus groups, unfinished responses and groups to replay, and which checkpoint is the best one is kept."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.records import repeatable
from tests.helpers.runs import complete, finish, records, run, start, write_config
from tests.helpers.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

EVERY_LEVER: dict[str, Any] = {
    "checkpoint__asynchronous": True,
    "actor__memory": {
        "recompute": "full",
        "offload": {"parameters": True, "gradients": True, "optimizer": True},
    },
    "reference__memory__offload": True,
    "actor__optimizer__optimizer_offload_fraction": 0.5,
}


def _config(folder: Path, **changes: Any) -> Path:
    return write_config(
        folder,
        seed=4,  # with which each step keeps some groups and leaves others to the next one
        resources__ranks_per_node=2,
        checkpoint__keep=1,
        checkpoint__keep_best="response_length",
        validation__every=1,
        train__steps=4,
        train__minibatches=2,
        actor__optimizer__schedule="cosine",
        algorithm__kl__coefficient=0.05,
        rewards__0__function="tests.trainer.test_first_rl_step:short_answers",  # which varies within groups
        rollout__max_response_tokens=12,
        train__dynamic_sampling={"oversample": 2.0, "check_every": 2},
        train__replay={"capacity": 20, "fraction": 0.25, "order": "uniform"},
        **changes,
    )


def _check_best_kept(run_dir: Path) -> None:
    """The newest checkpoint and the one with the longest responses are there, and no other."""
    lengths = {record["step"]: record["validation/response_length"] for record in records(run_dir)[4:]}
    best = max(lengths, key=lambda step: lengths[step])
    kept = sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
    assert kept == sorted({3 + best, 3 + 4}), lengths


def kill_at(process: Any, run_dir: Path, count: int) -> None:
    """SIGKILL a rank a moment after metrics.jsonl has ``count`` lines."""
    until(lambda: len(records(run_dir)) >= count or process.poll() is not None, f"{count} records", seconds=900)
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.05 * count)  # between steps, in the middle of a save, in the next step
    rank = json.loads((sorted((run_dir / "attempts").iterdir())[-1] / "exits" / "rank-00001.start.json").read_text())
    os.kill(rank["process"]["pid"], signal.SIGKILL)


# Kill when this many records are there: in RL, once a whole checkpoint holds what a step has left to the next ones;
# and at the change of phases.
@pytest.mark.parametrize("kills", [(7,), pytest.param((3, 7), marks=pytest.mark.long)])
def test_killed_runs_resume_bit_equal(tmp_path: Path, kills: tuple[int, ...]) -> None:
    """And with every lever of memory and saves in the background, neither of which changes a bit."""
    straight = _config(tmp_path / "straight", checkpoint__every=0)
    complete(straight)
    _check_best_kept(tmp_path / "straight" / "run")
    expected = [repeatable(record) for record in records(tmp_path / "straight" / "run")]
    assert [(r["phase"], r["step"]) for r in expected] == [
        *(("sft", step) for step in (1, 2, 3)),
        *(("rl", step) for step in range(5)),
    ]
    for record in expected[4:-1]:  # which a resumed run may continue from
        assert record["sampling/kept_groups"] > 0
        assert record["sampling/carried_groups"] > 0
    for record in expected[4:]:
        assert (record["replay/used_groups"], record["sampling/staleness_max"] > 0) == (
            (4, True) if record["step"] > 1 else (0, False)
        )

    config = _config(tmp_path / "killed", checkpoint__every=1, recovery__wait_seconds=0, **EVERY_LEVER)
    run_dir = tmp_path / "killed" / "run"
    process = start(config)
    for count in kills:
        kill_at(process, run_dir, count)
    code, output = finish(process)
    assert code == 0, output
    assert output.count("ended, crash (rank 1 on") == len(kills)
    assert [repeatable(record) for record in records(run_dir)] == expected
    _check_best_kept(run_dir)


def test_a_second_run_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__steps=0, sft__steps=1, data__validation=[])
    assert run(config)[0] == 0
    code, output = run(config)
    assert code == 2
    assert "already contains a run" in output
    assert "--resume" in output
    assert len(output.strip().splitlines()) == 1

"""Engines in the order of arrival, with the real trainer and engines: every prompt once within the bound, also after a
kill; and a replay of the record is equal bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.rollout.generator.record import read_record
from tests.helpers.runs import complete, run
from tests.trainer.test_separate import PROMPTS, STEPS, last_checkpoint, run_with_kills, separate, steps_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

ARRIVAL: dict[str, Any] = {
    "resources__ranks_per_node": 3,
    "rollout__ranks": 2,
    "asynchrony__schedule": "arrival",
    "checkpoint__every": 1,
    "checkpoint__keep": 1,
}


def arrival(folder: Path, max_staleness: int = 1, **changes: Any) -> Path:
    """The configuration of a run with the inputs beside its folder, which others share."""
    inputs = folder.parent / "inputs"
    shared = {
        "prepare__arguments__folder": str(inputs),
        "model__path": str(inputs / "model"),
        "data__train": [str(inputs / "train.parquet")],
        "data__validation": [str(inputs / "validation.jsonl")],
        "sft__data": [str(inputs / "sft.jsonl")],
    }
    return separate(folder, max_staleness, **{**ARRIVAL, **shared, **changes})


def trained(folder: Path) -> list[int]:
    """The groups that steps have trained on, step by step."""
    batches = read_record(RunFolder(folder / "run")).batches
    assert sorted(batches) == list(range(STEPS))
    return [group for step in range(STEPS) for group in batches[step].kept]


def check_once(groups: list[int], max_staleness: int) -> None:
    """As many groups as the steps have prompts, each once. In the last steps, some that were begun for steps beyond may
    be done before others."""
    assert len(groups) == len(set(groups)) == STEPS * PROMPTS
    assert set(groups) >= set(range((STEPS - 1 - max_staleness) * PROMPTS))
    assert max(groups) < (STEPS + max_staleness) * PROMPTS


@pytest.mark.long
def test_a_replay_of_a_run_has_the_same_weights(tmp_path: Path) -> None:
    """Also of another run of the same configuration, whose order was another one."""
    complete(arrival(tmp_path / "first"))
    check_once(trained(tmp_path / "first"), 1)
    assert all(record["sampling/staleness_max"] <= 1 for record in steps_of(tmp_path / "first"))

    complete(arrival(tmp_path / "again"), "--replay", str(tmp_path / "first" / "run"))
    assert trained(tmp_path / "again") == trained(tmp_path / "first")
    assert steps_of(tmp_path / "again") == steps_of(tmp_path / "first")
    assert last_checkpoint(tmp_path / "again") == last_checkpoint(tmp_path / "first")


@pytest.mark.long
def test_a_replay_of_a_killed_run_has_the_same_weights(tmp_path: Path) -> None:
    run_with_kills(arrival(tmp_path / "killed", 2), ((1, 2), (0, 3)))
    check_once(trained(tmp_path / "killed"), 2)
    complete(arrival(tmp_path / "again", 2), "--replay", str(tmp_path / "killed" / "run"))
    assert steps_of(tmp_path / "again") == steps_of(tmp_path / "killed")
    assert last_checkpoint(tmp_path / "again") == last_checkpoint(tmp_path / "killed")


def test_a_replay_with_another_configuration_is_refused(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded" / "run"
    recorded.mkdir(parents=True)
    config = arrival(tmp_path / "again", algorithm__kl__coefficient=0.25)
    (recorded / "config.yaml").write_text(arrival(tmp_path / "recorded").read_text())
    code, output = run(config, "--replay", str(recorded))
    assert code == 2
    assert "algorithm.kl.coefficient: 0.25, but 0.001 in the run that is replayed" in output, output
    code, output = run(arrival(tmp_path / "keep", asynchrony__in_flight="keep"), f"asynchrony.replay={recorded}")
    assert code == 2
    assert "asynchrony.in_flight: keep, but a kept KV cache depends on" in output, output
    code, output = run(arrival(tmp_path / "lend", placement="lend"))
    assert code == 2
    assert "asynchrony.schedule: arrival, but trainers' ranks return requests at a virtual time" in output, output

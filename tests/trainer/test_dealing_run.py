"""A run that deals responses to its engines trains on what one with equal shares does, and goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.records import repeatable
from rlhpc.rollout.response_lengths import ResponseLengths
from tests.helpers.runs import complete, records, write_config
from tests.trainer.test_separate import separate

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["phase"] == "rl" and "reward/mean" in record]


def with_long_responses(folder: Path) -> dict[str, Any]:
    """Keys of a run in which each step has the eight prompts of the step before."""
    inputs, make = folder / "inputs", "rlhpc.data.arithmetic:make"
    return {
        "prepare": {"function": make, "arguments": {"folder": str(inputs), "validation": 8}},
        "data__train": [str(inputs / "validation.jsonl")],
        "train__steps": 3,
        "train__prompts_per_step": 8,
        "data__validation": [],
        "resources__ranks_per_node": 2,
        "rollout__max_response_tokens": 47,
        "rollout__temperature": 2.0,
        "rollout__sampling": {"min_tokens": 33},  # longer than a turn
        "rollout__max_num_seqs": 3,
        "checkpoint__every": 1,
    }


def run_each_way(config: Path, folder: Path) -> list[list[dict[str, Any]]]:
    """Records of the steps of a run with equal shares, one with turns, and one with turns that is resumed."""
    for name, *options in (
        ("equal", "rollout.dealing=equal"),
        ("turns", "rollout.dealing=turns"),
        ("parts", "rollout.dealing=turns", "train.steps=2"),
        ("parts", "rollout.dealing=turns", "--resume"),
    ):
        complete(config, *options, f"run_dir={folder / name}")
    found = [steps_of(folder / name) for name in ("equal", "turns", "parts")]
    assert [len(steps) for steps in found] == [3, 3, 3]
    return found


def test_a_run_with_turns_equals_one_with_equal_shares(tmp_path: Path) -> None:
    config = write_config(tmp_path, **with_long_responses(tmp_path))
    equal, turns, parts = run_each_way(config, tmp_path)
    for one, other, resumed in zip(equal, turns, parts, strict=True):
        for name in ("reward/mean", "rollout/completion_tokens", "response/length_max"):
            assert one[name] == other[name]
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-4)
        dealing = [name for name in other if name.startswith("rollout/") and name != "rollout/completion_tokens"]
        assert sorted(dealing) == ["rollout/moved_responses", "rollout/turns_ended", "rollout/waiting_responses_max"]
        assert {name: resumed[name] for name in dealing} == {name: other[name] for name in dealing}
        assert resumed["entropy"] == other["entropy"], "bit for bit"
        assert other["rollout/waiting_responses_max"] > 0
        assert other["rollout/turns_ended"] > 0
        assert not any(name in one for name in (*dealing, "perf/deal_seconds_max"))
        assert other["perf/deal_seconds_max"] > 0
    assert list((tmp_path / "turns" / "checkpoints").glob("*/response_lengths.npz"))


def test_an_engine_of_its_own_repeats_and_resumes_turns_bit_for_bit(tmp_path: Path) -> None:
    """At staleness 0 its responses are those of an engine without turns."""
    config = separate(tmp_path, 0, **with_long_responses(tmp_path))
    equal, turns, parts = run_each_way(config, tmp_path)
    for one, other in zip(turns, parts, strict=True):
        assert repeatable({**other, "total_steps": 3}) == repeatable(one)
    for one, other in zip(equal, turns, strict=True):
        for name in ("reward/mean", "rollout/completion_tokens", "response/length_max"):
            assert one[name] == other[name]
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-4)
        assert "rollout/turns_ended" not in one
    assert sum(record["rollout/turns_ended"] for record in turns) > 0
    assert max(record["rollout/waiting_responses_max"] for record in turns) == 3, "the rest of a group"
    lengths = [ResponseLengths(), ResponseLengths()]
    for found, name in zip(lengths, ("turns", "parts"), strict=True):
        found.load(max((tmp_path / name / "checkpoints").glob("step-*")))
    assert lengths[0].ratios
    assert lengths[0] == lengths[1]

"""A run that deals responses to its engines trains on what one with equal shares does, and goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["phase"] == "rl" and "reward/mean" in record]


def test_a_run_with_turns_equals_one_with_equal_shares(tmp_path: Path) -> None:
    inputs, make = tmp_path / "inputs", "rlhpc.data.arithmetic:make"
    config = write_config(
        tmp_path,
        prepare={"function": make, "arguments": {"folder": str(inputs), "validation": 8}},
        data__train=[str(inputs / "validation.jsonl")],  # eight prompts: each step has those of the step before
        train__steps=3,
        train__prompts_per_step=8,
        data__validation=[],
        resources__ranks_per_node=2,
        rollout__max_response_tokens=47,
        rollout__temperature=2.0,
        rollout__sampling={"min_tokens": 33},  # longer than a turn
        rollout__max_num_seqs=3,
        checkpoint__every=1,
    )
    for name, *options in (
        ("equal", "rollout.dealing=equal"),
        ("turns", "rollout.dealing=turns"),
        ("parts", "rollout.dealing=turns", "train.steps=2"),
        ("parts", "rollout.dealing=turns", "--resume"),
    ):
        code, output = run(config, *options, f"run_dir={tmp_path / name}")
        assert code == 0, output
    equal, turns, parts = (steps_of(tmp_path / name) for name in ("equal", "turns", "parts"))
    assert len(equal) == len(turns) == len(parts) == 3
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

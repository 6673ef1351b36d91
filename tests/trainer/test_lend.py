"""Trainers' ranks that generate while they would wait: bit-equal to itself, also after a trainer and an engine were
killed, with what else a step may have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import complete, records
from tests.trainer.test_separate import COSTS, PROMPTS, STEPS, last_checkpoint, run_with_kills, separate, steps_of
from tests.trainer.test_separate_parts import TOOLS, tool_inputs

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

HERE = "tests.trainer.test_separate_parts"
# name: maximum staleness, trainers, engines, further keys, a metric that some step has above 0
RUNS: dict[str, tuple[int, int, int, dict[str, Any], str]] = {
    "staleness 0": (0, 1, 1, {}, "trainers/lent_tokens"),
    "two lenders of an engine": (1, 2, 1, {}, "staleness/1/token_fraction"),
    "tensor parallel engines": (1, 2, 1, {"rollout__tp": 2, "rollout__ranks": 2}, "staleness/1/token_fraction"),
    "filter": (
        1,
        1,
        2,
        {"train__dynamic_sampling": {"filter": f"{HERE}:keeps"}},
        "sampling/dropped_groups",
    ),
    "tools": (1, 1, 1, {"rollout__tools": TOOLS, "rollout__max_response_tokens": 64}, "tools/calls"),
    "experts": (
        1,
        1,
        1,
        {
            "prepare__function": "tests.trainer.test_experts:make",
            "prepare__arguments__kind": "qwen3moe",
            "actor__moe__router_replay": True,
        },
        "staleness/1/token_fraction",
    ),
}


def lending(folder: Path, max_staleness: int = 1, trainers: int = 1, engines: int = 1, **changes: Any) -> Path:
    """Lenders continue requests for two or three of their steps."""
    known = {
        "placement": "lend",
        "rollout__ranks": engines,
        "resources__ranks_per_node": trainers + changes.get("rollout__ranks", engines),
        "asynchrony__costs": {**COSTS, "lend_seconds": 0.05},
    }
    return separate(folder, max_staleness, **{**known, **changes})


def lent(folder: Path) -> list[tuple[float, float, float]]:
    """Requests that lenders got, turns that ended there, and tokens, of each step."""
    return [
        tuple(record[f"trainers/lent_{what}"] for what in ("requests", "ended", "tokens"))  # type: ignore[misc]
        for record in records(folder / "run")
        if record["phase"] == "rl" and record["step"]
    ]


def test_trainers_ranks_generate_while_they_would_wait(tmp_path: Path) -> None:
    complete(lending(tmp_path, steps=3, validation__max_prompts=8))
    requests, ended, tokens = map(sum, zip(*lent(tmp_path), strict=True))
    assert 0 < ended < requests < tokens
    steps = records(tmp_path / "run")
    differences = [record["logprob_diff_mean"] for record in steps if "logprob_diff_mean" in record]
    assert differences  # a step that keeps no group has none
    assert all(math.isclose(difference, 0.0, abs_tol=1e-5) for difference in differences)
    for record in steps:
        if record["phase"] == "rl" and record["step"]:
            assert record["sampling/staleness_max"] <= 1
            assert 0 <= record["trainers/lent_fraction"] + record["trainers/idle_fraction"] <= 1
    assert last_checkpoint(tmp_path)[1] == 3 * PROMPTS


@pytest.mark.long
def test_without_time_to_generate_a_run_equals_one_that_does_not_lend(tmp_path: Path) -> None:
    none = lending(tmp_path / "lend", steps=3, asynchrony__costs={**COSTS, "lend_seconds": 0.0})
    for config in (none, separate(tmp_path / "separate", 1, steps=3)):
        complete(config)
    assert steps_of(tmp_path / "lend") == steps_of(tmp_path / "separate")
    assert last_checkpoint(tmp_path / "lend") == last_checkpoint(tmp_path / "separate")
    assert not any(name.startswith("trainers/lent") for record in records(tmp_path / "lend" / "run") for name in record)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_killed_runs_that_lend_resume_bit_equal(tmp_path: Path, backend: str) -> None:
    """A run that was killed twice equals another one, which was not: also in what it lends."""
    saves = {"checkpoint__every": 1, "checkpoint__keep": 1, "train__backend": backend}
    complete(lending(tmp_path / "straight", **saves))
    expected = steps_of(tmp_path / "straight")
    assert [record["sampling/staleness_max"] for record in expected] == [0, 1, 1, 1, 1]

    run_with_kills(lending(tmp_path / "killed", **saves), ((1, 2), (0, 3)))
    assert steps_of(tmp_path / "killed") == expected
    assert lent(tmp_path / "killed") == lent(tmp_path / "straight")
    assert sum(requests for requests, *_ in lent(tmp_path / "killed")) > 0
    assert last_checkpoint(tmp_path / "killed") == last_checkpoint(tmp_path / "straight")
    assert last_checkpoint(tmp_path / "killed")[1] == STEPS * PROMPTS


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_lends_trains_within_its_staleness(name: str, tmp_path: Path) -> None:
    staleness, trainers, engines, changes, metric = RUNS[name]
    if name == "tools":
        changes = {**changes, **tool_inputs(tmp_path)}
    shorter = {"validation__max_prompts": 8, "checkpoint__every": 2, "steps": 4}
    complete(lending(tmp_path, staleness, trainers, engines, **{**shorter, **changes}))
    steps = [record for record in records(tmp_path / "run") if record["phase"] == "rl" and record["step"]]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert any(record.get(metric, 0) > 0 for record in steps), f"no step has {metric}"
    assert max(record["sampling/staleness_max"] for record in steps) == staleness
    requests, ended, tokens = map(sum, zip(*lent(tmp_path), strict=True))
    assert 0 < ended < requests < tokens
    for record in steps:  # tokens of the newest weights, which both sides compute alike
        assert math.isclose(record.get("logprob_diff_mean", 0.0), 0.0, abs_tol=1e-4)

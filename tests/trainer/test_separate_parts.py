"""Engines on ranks of their own, with what else a step may have: a critic, tools, experts, filters, replayed groups."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import complete, records, write_config
from tests.rollout.tool_task import make_task, tool_sections
from tests.trainer.test_separate import COSTS

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]

HERE = "tests.trainer.test_separate_parts"
TOOLS = [section for section in tool_sections() if section["name"] in ("add", "reach", "count")]
# name: (engines, maximum staleness, responses in flight, further keys, a metric that some step has above 0)
RUNS: dict[str, tuple[int, int, str, dict[str, Any], str]] = {
    "critic": (2, 2, "keep", {"algorithm__name": "ppo", "algorithm__kl": {"coefficient": 0.01}}, "critic/loss"),
    "experts": (
        1,
        1,
        "recompute",
        {
            "prepare__function": "tests.trainer.test_experts:make",
            "prepare__arguments__kind": "qwen3moe",
            "actor__moe__router_replay": True,
        },
        "staleness/1/token_fraction",
    ),
    "filter": (2, 2, "recompute", {"train__dynamic_sampling": {"filter": f"{HERE}:keeps"}}, "sampling/dropped_groups"),
    "nothing kept": (
        2,
        1,
        "recompute",
        {"train__dynamic_sampling": {"filter": f"{HERE}:refuses", "max_batches": 2}},
        "sampling/missing_groups",
    ),
    "replay": (
        2,
        2,
        "finish",
        {"train__replay": {"capacity": 32, "fraction": 0.25, "max_staleness": 4}},
        "replay/used_groups",
    ),
    "greedy": (
        1,
        1,
        "recompute",
        {
            "algorithm__name": "remax",
            "rewards__0__function": f"{HERE}:fails_at_times",
            "reward_workers__on_failure": "drop",
        },
        "reward/failures/raised",
    ),
    "tools": (2, 1, "recompute", {"rollout__tools": TOOLS, "rollout__max_response_tokens": 64}, "tools/calls"),
}


def keeps(samples: Any) -> bool:
    """Drops a third of the groups."""
    return bool(samples[0].prompt_id % 3)


def refuses(samples: Any) -> bool:
    return False


def fails_at_times(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    if ground_truth.endswith("3"):
        raise ValueError("not this one")
    return 1.0 / (1 + len(solution_str)) + 0.1 * solution_str.count("7")


def tool_inputs(folder: Path, kind: str = "qwen2") -> dict[str, Any]:
    """Keys of a run on the task of tools, made in a folder."""
    model = make_task(folder, kind)
    return {
        "prepare": None,
        "model": {"path": str(model / "model"), "dtype": "float32"},
        "data": {"train": [str(model / "train.jsonl")], "max_prompt_tokens": 96},
        "sft": None,
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_within_its_staleness(name: str, tmp_path: Path) -> None:
    engines, staleness, in_flight, changes, metric = RUNS[name]
    if name == "tools":
        changes = {**changes, **tool_inputs(tmp_path)}
    known: dict[str, Any] = {
        "sft__steps": 1,
        "train__steps": 4,
        "train__prompts_per_step": 8,
        "rewards__0__function": "tests.trainer.test_first_rl_step:short_answers",
        "rollout__max_response_tokens": 12,
        "rollout__max_num_seqs": 12,
        "rollout__ranks": engines,
        "validation__every": 2,
        "validation__max_prompts": 8,
        "checkpoint__every": 2,
        "resources__ranks_per_node": 1 + engines,
        "placement": "separate",
        "asynchrony": {"max_staleness": staleness, "in_flight": in_flight, "costs": COSTS},
    }
    complete(write_config(tmp_path, **{**known, **changes}))
    steps = [record for record in records(tmp_path / "run") if record["phase"] == "rl" and record["step"]]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert any(record.get(metric, 0) > 0 for record in steps), f"no step has {metric}"
    ages = [record["sampling/staleness_max"] for record in steps if "sampling/staleness_max" in record]
    if "train__replay" not in changes:
        assert max(ages, default=0) <= staleness
    assert (max(ages, default=0) > 0) == (name != "nothing kept")
    for record in steps:  # tokens of the newest weights, which both sides compute alike
        assert math.isclose(record.get("logprob_diff_mean", 0.0), 0.0, abs_tol=1e-4)

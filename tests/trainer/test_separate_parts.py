"""Engines on ranks of their own, with what else a step may have, changes before a resume, and weights as deltas."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.commands import rlhpc
from tests.helpers.runs import complete, finish, records, start, write_config
from tests.helpers.waiting import until
from tests.rollout.tool_task import make_task, tool_sections
from tests.trainer.test_separate import COSTS, PROMPTS, last_checkpoint, separate, steps_of

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


def _changed(config: Path, **changes: Any) -> Path:
    """The config with other keys, None for those to leave out."""
    known = {**yaml.safe_load(config.read_text()), **changes}
    config.write_text(yaml.safe_dump({key: value for key, value in known.items() if value is not None}))
    return config


def test_a_run_changes_its_placement_and_its_batch_when_it_resumes(tmp_path: Path) -> None:
    """Separate, colocated, separate again, with a larger staleness and more prompts; no prompt is lost or repeated."""
    config = separate(tmp_path, 1, checkpoint__every=1, steps=2)
    base = yaml.safe_load(config.read_text())
    rollout = {key: value for key, value in base["rollout"].items() if key != "ranks"}
    stages: list[tuple[int, int, dict[str, Any]]] = [  # steps in all, prompts per step, changes
        (2, PROMPTS, {}),
        (4, PROMPTS, {"placement": None, "asynchrony": None, "rollout": rollout}),
        (6, PROMPTS, {key: base[key] for key in ("placement", "asynchrony", "rollout")}),
        (8, 12, {"asynchrony": {"max_staleness": 2, "costs": COSTS}}),
    ]
    cursor = last = 0
    for steps, prompts, changes in stages:
        train = {**base["train"], "steps": steps, "prompts_per_step": prompts}
        complete(_changed(config, train=train, **changes), *(["--resume"] if last else []))
        cursor, last = cursor + (steps - last) * prompts, steps
        assert last_checkpoint(tmp_path)[1] == cursor
    found = steps_of(tmp_path)
    assert [record["step"] for record in found] == list(range(1, 9))
    ages = [record.get("sampling/staleness_max", 0) for record in found]
    assert ages[2:4] == [0, 0], "colocated"
    assert max(ages[4:6]) == 1
    assert 1 <= max(ages[6:]) <= 2


def test_a_run_that_stops_in_the_warm_up_resumes_bit_equal(tmp_path: Path) -> None:
    """And nothing of the engines is in its checkpoint."""

    def with_warm_up(folder: Path) -> Path:
        config = separate(folder, 1, steps=3)
        return _changed(config, sft={**yaml.safe_load(config.read_text())["sft"], "steps": 30})

    complete(with_warm_up(tmp_path / "straight"))
    config = with_warm_up(tmp_path / "stopped")
    process, folder = start(config), tmp_path / "stopped" / "run"
    until(lambda: process.poll() is not None or len(records(folder)) >= 3, "a supervised step", seconds=900)
    assert process.poll() is None, process.communicate()[0]
    started = json.loads((folder / "attempts" / "0001" / "exits" / "rank-00000.start.json").read_text())
    os.kill(started["process"]["pid"], signal.SIGTERM)
    finish(process)
    (saved,) = (folder / "checkpoints").glob("step-*")
    assert not (saved / "engines").exists()
    assert json.loads((saved / "state.json").read_text())["state"]["sft_step"] < 30
    complete(config, "--resume")
    assert steps_of(tmp_path / "stopped") == steps_of(tmp_path / "straight")
    assert last_checkpoint(tmp_path / "stopped") == last_checkpoint(tmp_path / "straight")


def huge(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Finite rewards, whose mean in a group is not always."""
    return 1.7e308 if ground_truth.endswith("3") else float(len(solution_str))


def test_an_update_that_is_skipped_can_be_replayed(tmp_path: Path) -> None:
    config = separate(tmp_path, 1, steps=2)
    rewards = [{"function": "tests.trainer.test_separate_parts:huge"}]
    train = {**yaml.safe_load(config.read_text())["train"], "max_skipped_updates": 99}
    complete(_changed(config, rewards=rewards, train=train))
    skipped = [record["skipped_updates"] for record in steps_of(tmp_path)]
    assert sum(skipped) > 0
    done = rlhpc("replay", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "advantages" in done.stdout, "what is not finite in the batch"


def test_an_engine_of_two_ranks_calls_tools(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        train__steps=3,
        train__prompts_per_step=8,
        rewards__0__function="tests.trainer.test_first_rl_step:short_answers",
        rollout__tools=TOOLS,
        rollout__max_response_tokens=64,
        rollout__max_num_seqs=12,
        rollout__ranks=2,
        rollout__tp=2,
        resources__ranks_per_node=3,
        placement="separate",
        asynchrony={"max_staleness": 1, "costs": COSTS},
        **tool_inputs(tmp_path),
    )
    complete(config)
    found = steps_of(tmp_path)
    assert len(found) == 3
    assert max(record["tools/calls"] for record in found) > 0
    assert max(record["sampling/staleness_max"] for record in found) == 1
    assert all(record["logprob_diff_mean"] < 1e-4 for record in found if "logprob_diff_mean" in record)


def test_a_run_with_deltas_equals_one_without(tmp_path: Path) -> None:
    keys = {"model__dtype": "bfloat16", "steps": 4}
    for delta in ("off", "compressed"):
        output = complete(separate(tmp_path / delta, 1, reshard__delta=delta, **keys))
        assert "wrong checksum" not in output
    assert steps_of(tmp_path / "compressed") == steps_of(tmp_path / "off")
    with_deltas = [record for record in records(tmp_path / "compressed" / "run") if record["phase"] == "rl"]
    first, *later = [
        {name.partition("/")[2]: record[name] for name in record if name.startswith("weight_sync/")}
        for record in with_deltas
        if record["step"]
    ]
    assert len(later) == 3
    assert first["sent_bytes_sum"] >= first["weights_bytes_sum"] > 0
    for each in later:
        assert each["weights_bytes_sum"] == first["weights_bytes_sum"]
        assert 0 < each["sent_bytes_sum"] < 0.6 * each["weights_bytes_sum"]
        assert 0 < each["changed_elements_sum"] < 0.5 * each["weights_bytes_sum"]
        assert each["repaired_messages_sum"] == 0
    assert not any(name.startswith("weight_sync/") for r in records(tmp_path / "off" / "run") for name in r)

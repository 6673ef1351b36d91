"""Engines on ranks of their own, in runs that change or stop: placement and sizes at a resumption, a stop in the
warm-up, an update that is skipped and replayed, an engine of two ranks with tools."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.commands import rlhpc
from tests.helpers.runs import complete, finish, records, start, write_config
from tests.helpers.waiting import until
from tests.trainer.test_separate import COSTS, PROMPTS, last_checkpoint, separate, steps_of
from tests.trainer.test_separate_parts import TOOLS, tool_inputs

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]


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
    rewards = [{"function": "tests.trainer.test_separate_changes:huge"}]
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

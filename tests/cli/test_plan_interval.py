"""``rlhpc plan run`` recommends an interval between checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.core import attempts
from rlhpc.core.attempts import AttemptTimes, write_times
from rlhpc.core.folder import RunFolder
from rlhpc.core.text import duration
from tests.cli.test_plan import READY, plan
from tests.helpers.runs import ROOT

SEPARATE = str(ROOT / "configs" / "ready" / "qwen2.5-7b-2nodes-separate.yaml")


def test_the_interval_follows_from_a_save_and_a_stated_risk(tmp_path: Path) -> None:
    """Of a save as predicted; then of one that an attempt in the run folder has measured."""
    words = (READY, f"run_dir={tmp_path}", "planning.node_mtbf_hours=5000")
    before = json.loads(plan("run", *words, "--json"))["run"]
    found = before["checkpoint_interval"]
    assert (found["save"], found["measured"], found["mtbf"]) == (before["save"], False, 5000 * 3600)
    assert found["best"] == pytest.approx((2 * found["save"] * found["mtbf"]) ** 0.5)
    assert found["configured"] == pytest.approx(20 * before["step"])
    known = {"job_id": "", "restart_count": 0, "nodes": ("a",), "world_size": 8, "saved_step": -1}
    write_times(attempts.begin(RunFolder(tmp_path), **known), AttemptTimes(100.0, 10.0, None, (100.0,)))
    text = plan("run", *words, "checkpoint.every=0")
    assert (
        "\ninterval  16 h 40 min between checkpoints lose least (checkpoint.every_minutes=1000): 0.3% of the time; "
        in text
    )
    assert "none but the last is configured\n" in text
    assert (
        "for a checkpoint of 100 s (measured) and a failure in 5,000 hours (planning.node_mtbf_hours / nodes)" in text
    )


@pytest.mark.heavy
def test_the_cost_of_a_lost_engine_is_said_where_it_is_no_restart(tmp_path: Path) -> None:
    words = (SEPARATE, f"run_dir={tmp_path}", "planning.node_mtbf_hours=5000", "planning.start_seconds=115")
    assert "engine_loss" not in json.loads(plan("run", *words, "--json"))["run"]
    rejoin = (*words, "recovery.lost_engines=rejoin", "recovery.engine_timeout_seconds=40")
    run = json.loads(plan("run", *rejoin, "--json"))["run"]
    found, start = run["engine_loss"], run["start"]
    assert (found["silent"], found["slow"], found["away"]) == (40, 1800, 5 + start)
    assert found["restart"] == start + run["checkpoint_interval"]["configured"] / 2
    assert found["share"] == pytest.approx(found["away"] / found["engines"] / (5000 * 3600))
    text = plan("run", *rejoin)
    assert f"\nlosses    an engine that is killed is back after {duration(5 + start)} " in text
    assert "trainers wait at most 40 s for one that does not respond (recovery.engine_timeout_seconds)" in text

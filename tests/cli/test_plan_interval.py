"""``rlhpc plan run`` recommends an interval between checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.core import attempts
from rlhpc.core.attempts import AttemptTimes, write_times
from rlhpc.core.folder import RunFolder
from tests.cli.test_plan import READY, plan


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

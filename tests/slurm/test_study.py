"""``rlhpc study compare`` submits what is missing of its runs to a real Slurm, and compares them afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT, write_config
from tests.helpers.waiting import until
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.long  # the test of the submission itself: tests/slurm/test_submit.py
def test_missing_runs_are_submitted_once_and_then_compared(cluster: Cluster, tmp_path: Path) -> None:
    files = []
    for name, rate in (("low", 0.001), ("high", 0.01)):
        more = {"sft": None, "train__steps": 1, "validation__every": 1, "actor__optimizer__learning_rate": rate}
        slurm = {"nodes": 1, "gpus_per_node": 0, "time": 10}
        files.append(str(write_config(tmp_path / name, name=name, slurm=slurm, **more)))

    def study(*words: str) -> str:
        command = [sys.executable, "-m", "rlhpc.cli.main", "study", "compare", *files, *words]
        environ = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "200"}
        done = cluster.run(command, env=environ)
        return done.stdout + done.stderr

    submitted = study("--seeds=1")
    names = [line.split()[1] for line in submitted.splitlines() if line.startswith("submitted")]
    assert names == ["low-seed-0", "high-seed-0"], submitted
    until(lambda: not cluster.run("squeue -h").stdout.strip(), "both runs", seconds=400)
    compared = study("--seeds=1")  # nothing is missing now
    assert "pair      high - low: not decided (1 pair(s) of seeds; at least 3 are needed)" in compared
    assert "submitted" not in compared

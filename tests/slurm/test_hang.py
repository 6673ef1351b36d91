"""Hangs on several nodes: the watch is on the first, the rank at fault on another."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("scenario", "rank", "what"),
    [
        ("native", 3, "is stuck in native code (native: "),  # Slurm carries the signal that writes its stack
        pytest.param("stopped", 2, "does not answer (stopped, or its node is out of reach", marks=pytest.mark.long),
    ],
)
def test_the_blocking_rank_on_another_node_is_named(cluster: Cluster, tmp_path, scenario, rank, what):
    folder = tmp_path / "heartbeats"
    command = [sys.executable, "-W", "ignore", "-m", "tests.launch.hanging", str(folder), scenario, "watch"]
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", script=shlex.join(command), cwd=ROOT)
    cluster.wait_state(job, {"COMPLETED", "FAILED"}, timeout=600)
    output = (cluster.folder / "log" / f"job-{job}.out").read_text()
    assert (folder / "found.json").exists(), output
    found, node, silence = json.loads((folder / "found.json").read_text())
    print((folder / "hang.txt").read_text())
    assert (found, node) == (rank, "node2")
    assert silence < 14
    first = (folder / "hang.txt").read_text().splitlines()[0]
    assert what in first
    assert first.endswith("while 3 ranks wait for it in all_reduce #4 of the default group")

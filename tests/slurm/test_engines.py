"""An engine over two nodes, on a real Slurm: the same run as on one node, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.chaos import config, difference, submit
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(3000)]

SHORT = {"rollout__tp": 2, "sft__steps": 2, "train__steps": 2, "checkpoint__every": 2, "validation__every": 2}


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


def test_an_engine_over_two_nodes_makes_the_run_of_one_node(slurm, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    with Cluster.up(Settings(nodes=2)) as cluster:
        for node in cluster.nodes:  # no way to the internet, by which vLLM would look for a node's own address
            cluster.run("ip route delete default", node=node, check=True)
        jobs = [
            submit(cluster, config(one, 1, resources={"ranks_per_node": 2}, **SHORT)),
            submit(cluster, config(two, 2, **SHORT)),
        ]
        for job in jobs:
            cluster.wait_state(job, "COMPLETED", timeout=2500)
    assert len(samples(one)) > 0
    assert samples(two) == samples(one)
    assert difference(two / "run", one / "run") == ""
    starts = [json.loads(file.read_text()) for file in (two / "run").rglob("exits/*.start.json")]
    assert len({start["node"] for start in starts}) == 2

"""Nodes whose host names are not their names in Slurm, as on most clusters with a domain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings
from tests.slurm.test_recovery import history, outcomes, submit

pytestmark = pytest.mark.slurm
HOST = "gpu-{node}.compute.cluster.example.org"


@pytest.fixture(scope="module")
def long_named(slurm: None) -> Iterator[Cluster]:
    with Cluster.up(Settings(nodes=3, host_name=HOST)) as cluster:
        assert cluster.run("hostname", node="node2").stdout.strip() == HOST.format(node="node2")
        yield cluster


def test_a_bad_node_is_left_out_by_its_name_in_slurm(long_named, tmp_path):
    job = submit(long_named, tmp_path, "bad_node", "--nodes=3", nodes=[2, 3])
    long_named.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("bad_node", "retry"), ("finished", "none")]
    assert history(tmp_path)[0][1].node == "node2"
    assert history(tmp_path)[1][0].nodes == ("node1", "node3")
    starts = read_starts(RunFolder(tmp_path / "run").attempt(2).exits)
    assert {start.node for start in starts.values()} == {"node1", "node3"}


@pytest.mark.long
def test_a_job_returns_to_the_queue_without_the_bad_node(long_named, tmp_path):
    job = submit(long_named, tmp_path, "bad_node")
    long_named.wait_state(job, "COMPLETED", restarts=1)
    assert long_named.job(job)["ExcNodeList"] == "node2"
    assert outcomes(tmp_path) == [("bad_node", "requeue"), ("finished", "none")]

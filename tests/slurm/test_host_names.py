"""Nodes whose host names are not their names in Slurm, and names with wrong addresses."""

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


@pytest.mark.long
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


@pytest.fixture
def hosts_of(long_named, tmp_path):
    """Replaces lines of a node's /etc/hosts, which is put back afterwards."""
    changed = []

    def change(node: str, *lines: str) -> None:
        file, names = tmp_path / f"hosts.{node}", [line.split()[1] for line in lines]
        known = long_named.run(["cat", "/etc/hosts"], node=node, check=True).stdout.splitlines()
        file.write_text("\n".join([*lines, *(line for line in known if line.split()[1] not in names)]) + "\n")
        long_named.run(["mount", "--bind", str(file), "/etc/hosts"], node=node, check=True)
        changed.append(node)

    yield change
    for node in changed:
        long_named.run(["umount", "/etc/hosts"], node=node, check=True)


@pytest.mark.long
def test_a_node_that_cannot_reach_the_store_is_left_out(long_named, tmp_path, hosts_of):
    """It has an old address of the first node."""
    hosts_of("node2", "10.77.0.3 node1")
    job = submit(long_named, tmp_path, "done", "--nodes=3", nodes=[2, 3])
    long_named.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("bad_node", "retry"), ("finished", "none")]
    verdict = history(tmp_path)[0][1]
    assert verdict.node == "node2"
    assert "(10.77.0.3): no connection within 15 s (Connection refused)" in verdict.message
    assert history(tmp_path)[1][0].nodes == ("node1", "node3")


@pytest.mark.long
def test_ranks_meet_by_the_name_in_another_network(long_named, tmp_path, hosts_of):
    """Slurm's own name of the first node has no address here; that of the other network has."""
    for node in ("node1", "node2"):
        hosts_of(node, f"10.77.0.1 node1i {HOST.format(node='node1')}", "10.77.0.99 node1")
    keys = {"interface": "eth0", "rendezvous_host": "{node}i"}
    job = submit(long_named, tmp_path, "note_store", "--nodelist=node1,node2", slurm=keys)
    long_named.wait_state(job, "COMPLETED")
    stores = [(tmp_path / "run" / f"store-{rank}").read_text().rpartition(":")[0] for rank in (0, 1)]
    assert stores == ["node1i", "node1i"]

"""Nodes whose host names are not their names in Slurm, and names with wrong addresses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from tests.helpers.fake_driver import gpu_lines, uuid_of
from tests.helpers.runs import ROOT, write_config
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


BAD = {"node2": ("ok", "wedged"), "node3": ("ok",)}


@pytest.fixture(scope="module")
def gpu_cluster(slurm: None) -> Iterator[Cluster]:
    with Cluster.up(Settings(nodes=4, gpus=2)) as cluster:
        yield cluster


def test_nodes_with_a_missing_or_a_wedged_gpu_are_left_out(gpu_cluster: Cluster, driver: Path, tmp_path: Path) -> None:
    """A node's own list of GPUs, in its /mnt, precedes that of all nodes."""
    (tmp_path / "gpus").write_text(gpu_lines(("ok", "ok")))
    for node, states in BAD.items():
        (tmp_path / node).write_text(gpu_lines(states))
        gpu_cluster.run(["cp", str(tmp_path / node), "/mnt/gpus"], node=node, check=True)
    file = write_config(
        tmp_path,
        slurm={"nodes": [2, 4], "gpus_per_node": 2},
        recovery={"wait_seconds": 1},
        resources__ranks_per_node=2,
        train__prompts_per_step=24,
    )
    run = RunFolder(tmp_path / "run").create()
    run.config.write_text(file.read_text())
    script = [
        f"export LD_LIBRARY_PATH={driver} FAKE_GPUS=/mnt/gpus:{tmp_path}/gpus RLHPC_GPU_SECONDS=5",
        f"exec {sys.executable} -u -m rlhpc.launch.supervise.supervisor {run.path} tests.slurm.programs:done",
    ]
    options = ["--nodes=4", "--gpus-per-node=2", "--ntasks-per-node=2", "--requeue", f"--output={tmp_path}/log"]
    job = gpu_cluster.submit(*options, script="\n".join(script), cwd=ROOT)
    gpu_cluster.wait_state(job, "COMPLETED")
    assert outcomes(tmp_path) == [("bad_node", "retry"), ("bad_node", "retry"), ("finished", "none")]
    verdicts = {verdict.node: verdict.message for _, verdict in history(tmp_path)[:2] if verdict is not None}
    assert "CUDA finds 1 usable GPUs for 2 ranks" in verdicts["node3"]
    assert f"GPU 1 ({uuid_of(1)}) does not answer within 5 s" in verdicts["node2"]
    last, _ = history(tmp_path)[-1]
    assert (last.nodes, last.excluded) == (("node1", "node4"), ("node2", "node3"))

"""Nodes whose GPUs are gone or do not answer, on a real Slurm that hands out GPUs: named, left out, and replaced.

Slurm's GPUs are device files without devices. A stand-in for the driver's library is what each rank's check talks to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from tests.helpers.fake_driver import gpu_lines, uuid_of
from tests.helpers.runs import ROOT, write_config
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings
from tests.slurm.test_recovery import history, outcomes

pytestmark = pytest.mark.slurm

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

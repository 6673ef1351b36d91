"""A site with two clusters and one accounting database: a run on the cluster that is not the login node's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.front import Front
from tests.slurm.scontrol import wait
from tests.slurm.settings import address

pytestmark = [pytest.mark.slurm, pytest.mark.long]
OTHER = "second"
CONTROLLER, NODE = "node2", "other1"  # the second cluster's, both on the first one's second machine


def second_conf(cluster: Cluster) -> str:
    """The first cluster's file with another name, controller and node, and folders of its own."""
    folder, kept = cluster.folder, []
    for line in (folder / "slurm" / "slurm.conf").read_text().splitlines():
        if not line.startswith(("ClusterName", "SlurmctldHost", "NodeName", "PartitionName", "StateSave", "Slurmctld")):
            kept.append(line.replace("slurmd.%n", "second.%n").replace("spool/%n", "spool/second"))
    here = address(CONTROLLER)
    return "\n".join(
        [
            *(line for line in kept if line),
            f"ClusterName={OTHER}",
            f"SlurmctldHost={CONTROLLER}({here})",
            "SlurmctldPort=7817",
            "SlurmdPort=7818",
            f"SlurmctldPidFile={folder}/pids/second",
            f"SlurmctldLogFile={folder}/log/second.log",
            f"StateSaveLocation={folder}/state-second",
            f"NodeName={NODE} NodeAddr={here} CPUs=8 RealMemory=8000",
            f"PartitionName=other Nodes={NODE} Default=YES MaxTime=1-0 State=UP",
            "",
        ]
    )


@pytest.fixture
def two_clusters(accounted_cluster: Cluster) -> Cluster:
    cluster, folder = accounted_cluster, accounted_cluster.folder
    for name in ("state-second", "spool/second"):
        (folder / name).mkdir()
    conf = folder / "second" / "slurm.conf"
    conf.parent.mkdir()
    conf.write_text(second_conf(cluster))
    cluster.run(["sacctmgr", "-i", "add", "cluster", OTHER], check=True)
    cluster.run(["sacctmgr", "-i", "add", "account", "project", f"Cluster={OTHER}"], check=True)
    cluster.run(["sacctmgr", "-i", "add", "user", "root", "Account=project", f"Cluster={OTHER}"], check=True)
    for words in (["slurmctld"], ["slurmd", "-N", NODE]):
        cluster.run([words[0], "-f", str(conf), *words[1:]], node=CONTROLLER, cwd="/", check=True)
    idle = ["sinfo", "-M", OTHER, "-h", "-t", "idle", "-o", "%D"]
    wait(lambda: "1" in cluster.run(idle).stdout.split(), "the second cluster", cluster.log_tail)
    return cluster


def test_a_run_on_another_cluster_is_submitted_shown_and_cancelled(two_clusters: Cluster, tmp_path: Path) -> None:
    front = Front(two_clusters, tmp_path)
    refused = front.error_line(*front.submission(f"slurm.cluster={OTHER}", "slurm.partition=main"))
    assert refused == "slurm.partition: no partition 'main'; valid: other"
    job = front.submit("work", f"slurm.cluster={OTHER}")
    state = ["squeue", "-M", OTHER, "-h", "-j", job, "-o", "%T"]
    wait(lambda: "RUNNING" in two_clusters.run(state).stdout, "the job on the second cluster", two_clusters.log_tail)
    wait((front.run_dir / "working").exists, "its step")
    assert two_clusters.run(["squeue", "-h"]).stdout == "", "the first one has no job"
    assert f"on {NODE}" in front.ok("status", job)
    assert "running" in front.ok("status")
    assert "rank 0 of start 1" in front.ok("logs", job)
    front.ok("cancel", job)
    wait(lambda: not two_clusters.run(state).stdout.count("RUNNING"), "its end")
    assert (front.run_dir / "signalled").read_text() == "SIGTERM"
    wait(lambda: "cancelled" in front.ok("status", job), "the status of the job that has ended")

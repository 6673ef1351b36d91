"""The test clusters: several real nodes, faults that Slurm sees as on a real machine, and two clusters at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.front import Front
from tests.slurm.scontrol import parse_job, wait
from tests.slurm.settings import Settings, address

pytestmark = [pytest.mark.slurm, pytest.mark.long]
STAY = "srun sleep 3000"


def test_every_node_is_a_machine_of_its_own(cluster: Cluster) -> None:
    place = "echo $(hostname) $(hostname -i) $(ls /mnt /dev/shm | wc -l) $(readlink /proc/self/ns/net)"
    cluster.run("touch /mnt/local /dev/shm/local", node="node2", check=True)
    message = [
        line.split() for line in cluster.run(["srun", "-N4", "bash", "-c", place], check=True).stdout.splitlines()
    ]
    cluster.run("rm /mnt/local /dev/shm/local", node="node2", check=True)
    names, addresses, files, networks = zip(*sorted(message), strict=True)
    assert names == ("node1", "node2", "node3", "node4")
    assert addresses == tuple(f"10.77.0.{number}" for number in range(1, 5))
    assert len(set(networks)) == 4
    assert int(files[1]) - int(files[0]) == 2


def sleeps(cluster: Cluster, node: str) -> bool:
    return bool(cluster.run(["pgrep", "-x", "sleep"], node=node).stdout)


def test_users_are_apart(cluster: Cluster) -> None:
    jobs = {user: cluster.submit("--output=out", script="id -un; umask", user=user) for user in ("alice", "bob")}
    for user, job in jobs.items():
        assert cluster.wait_state(job, "COMPLETED")["UserId"].startswith(f"{user}(")
        assert (cluster.home(user) / "out").read_text().split()[0] == user
    assert cluster.run(["cat", str(cluster.home("bob") / "out")], user="alice").returncode == 1
    other = cluster.run(["scancel", str(cluster.submit(script=STAY, user="bob"))], user="alice")
    assert "Access/permission denied" in other.stderr
    # The interpreter and this repository, wherever they are.
    assert cluster.run([sys.executable, "-c", "import tests.slurm"], user="alice", cwd=Path.cwd()).returncode == 0


@pytest.fixture
def hasty_cluster(slurm: None) -> Iterator[Cluster]:
    """Four nodes in a cluster that gives up on a silent node early: one may be down for a moment on a busy machine."""
    with Cluster.up(Settings(slurmd_timeout=4, message_timeout=4)) as cluster:
        yield cluster


@pytest.fixture
def strict_cluster(slurm: None) -> Iterator[Cluster]:
    """Four nodes in a cluster that ends preempted jobs early."""
    with Cluster.up(Settings(grace_time=2, kill_wait=2)) as cluster:
        yield cluster


@pytest.mark.long  # what a run does then: test_recovery.py
def test_a_node_that_dies_is_down_and_its_job_runs_again(hasty_cluster: Cluster) -> None:
    """Three ways to die at once."""
    cluster = hasty_cluster
    one = ["--requeue", "--nodes=1"]
    crashed, unplugged, silent = (cluster.submit(*one, f"--nodelist=node{n}", script=STAY) for n in (1, 2, 3))
    for node in ("node1", "node2", "node3"):
        wait(lambda node=node: sleeps(cluster, node), f"the step on {node}")
    cluster.crash("node1")
    cluster.unplug("node2")
    cluster.kill_slurmd("node3")
    for job in (crashed, unplugged, silent):
        assert cluster.wait_state(job, "PENDING", restarts=1)["Restarts"] == "1"
    wait(lambda: [*cluster.node_states().values()] == ["down*"] * 3 + ["idle"], "three nodes to be down")
    assert sleeps(cluster, "node2"), "the orphan behind the pulled cable lives"
    assert sleeps(cluster, "node3"), "the orphan of the killed daemon lives"
    for job in (crashed, unplugged, silent):
        cluster.run(["scontrol", "update", f"JobId={job}", "NodeList=node4"], check=True)
    for job in (crashed, unplugged, silent):
        assert cluster.wait_state(job, "RUNNING")["NodeList"] == "node4"
    cluster.boot("node1")
    cluster.start_slurmd("node3")
    cluster.wait_nodes(["node1", "node3"])


@pytest.mark.long  # always: what becomes of a run then, in test_recovery.py
def test_the_urgent_preempts_the_others(strict_cluster: Cluster, tmp_path: Path) -> None:
    """The step hears of it first, then the job is requeued, and runs again when the urgent one has ended."""
    cluster = strict_cluster
    # The signal goes to all processes of the step: its sleeps end too.
    own = f"{tmp_path}/task-$SLURM_PROCID"
    message = f"scontrol show job -o $SLURM_JOB_ID > {own}; mv {own} {tmp_path}/message"
    script = f"srun bash -c 'trap \"{message}\" TERM; while :; do sleep 0.1; done'"
    job = cluster.submit("--nodes=4", script=script)
    wait(lambda: sleeps(cluster, "node1"), "the step")
    urgent = cluster.submit("--partition=urgent", "--nodes=4", "--exclusive", script="sleep 1")
    wait((tmp_path / "message").exists, "the signal")
    assert parse_job((tmp_path / "message").read_text())["JobState"] in ("RUNNING", "SIGNALING")
    cluster.wait_state(urgent, "COMPLETED")
    assert cluster.wait_state(job, "RUNNING", restarts=1)["NumNodes"] == "4"


def test_a_requeued_job_runs_again(cluster: Cluster) -> None:
    job = cluster.submit("--output=/dev/null", script='test "$SLURM_RESTART_COUNT" = 1 || srun sleep 3000')
    cluster.wait_state(job, "RUNNING")
    cluster.run(["scontrol", "requeue", str(job)], check=True)
    assert cluster.wait_state(job, "COMPLETED", restarts=1)["ExitCode"] == "0:0"


def test_jobs_outlive_the_controller(cluster: Cluster, tmp_path: Path) -> None:
    """It saves its state when it is asked to stop. Killed, it forgets the last seconds, and may start a job twice."""
    job = cluster.submit(script=f"until [ -e {tmp_path}/end ]; do sleep 0.1; done; exit 3")
    cluster.wait_state(job, "RUNNING")
    cluster.stop_controller()
    assert cluster.run(["scontrol", "ping"]).returncode == 1
    cluster.start_controller()
    (tmp_path / "end").touch()
    assert cluster.wait_state(job, "FAILED")["ExitCode"] == "3:0"


def test_nothing_authenticates_without_munge(cluster: Cluster) -> None:
    cluster.stop_munge()
    assert "Munge encode failed" in cluster.run(["sbatch", "--wrap", "true"]).stderr
    cluster.start_munge()
    cluster.wait_state(cluster.submit(script="true"), "COMPLETED")


def test_healing_leaves_nothing(cluster: Cluster) -> None:
    jobs = [cluster.submit("--nodes=2", script=f"trap '' TERM; {STAY}") for _ in range(3)]
    for job in jobs:
        cluster.wait_state(job, "RUNNING")
    cluster.crash("node4")
    cluster.stop_controller()
    cluster.heal()
    assert cluster.run(["squeue", "-h"]).stdout == ""
    assert set(cluster.node_states().values()) == {"idle"}
    assert cluster.run(["srun", "-N4", "true"]).returncode == 0


def test_signals_and_exit_codes_pass_through(cluster: Cluster) -> None:
    assert cluster.run("exit 7", node="node3").returncode == 7
    waits = "trap 'exit 9' INT; echo ready; while sleep 0.05; do :; done"
    with cluster.popen(waits, node="node1", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 9
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run("sleep 3000 & sleep 3001", node="node1", timeout=0.5)
    wait(lambda: not sleeps(cluster, "node1"), "the late command to be gone")


def test_two_clusters_at_once_and_fake_gpus(slurm: None) -> None:
    with Cluster.up(Settings(nodes=1, gpus=2)) as one, Cluster.up(Settings(nodes=2, cpus=3)) as two:
        message = one.run(["srun", "--gpus-per-node=2", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"], check=True)
        assert message.stdout == "0,1\n"
        assert two.run(["srun", "-N2", "nproc", "--all"], check=True).returncode == 0
        assert two.run(["sinfo", "-h", "-o", "%D %c %G", "-p", "main"]).stdout == "2 3 (null)\n"
    assert not one.folder.exists()
    assert not two.folder.exists()


def test_nothing_survives_a_killed_test_process(slurm: None) -> None:
    program = (
        "from tests.slurm.cluster import Cluster; from tests.slurm.settings import Settings; import time\n"
        "cluster = Cluster.up(Settings(nodes=2)); cluster.submit(script='sleep 3000')\n"
        "print(cluster.folder, cluster.login.pid, cluster.nodes['node2'].pid, flush=True); time.sleep(3000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        folder, *pids = process.stdout.readline().split()
        space = os.readlink(f"/proc/{pids[1]}/ns/pid")
        process.kill()
    wait(lambda: not Path(folder).exists(), "the folder to be gone")
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the machines to be gone")
    assert space not in namespaces()


def namespaces() -> set[str]:
    """The process namespaces of all processes of this machine."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            found.add(os.readlink(place))
        except OSError:
            continue
    return found


def test_the_accounting_database_answers(accounted_cluster: Cluster) -> None:
    job = accounted_cluster.submit("--account=project", script="exit 4", user="alice")
    ask = ["sacct", "-X", "-n", "-P", "-o", "State,User,Account,ExitCode", "-j", str(job)]
    wait(lambda: accounted_cluster.run(ask).stdout == "FAILED|alice|project|4:0\n", "sacct to know")
    refused = accounted_cluster.run(["sbatch", "--account=other", "--wrap", "true"], user="alice")
    assert "Invalid account or account/partition combination" in refused.stderr


def test_without_an_accounting_database_sacct_fails(cluster: Cluster) -> None:
    assert "accounting storage is disabled" in cluster.run(["sacct"]).stderr


def test_a_job_that_ends_otherwise_is_reported_at_once(cluster: Cluster) -> None:
    """Not when the wait's own time is over."""
    job = cluster.submit(script="exit 5")
    with pytest.raises(AssertionError, match="is FAILED, expected"):
        cluster.wait_state(job, "COMPLETED")


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

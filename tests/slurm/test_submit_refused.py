"""What `rlhpc submit` refuses on a real Slurm, and in which words."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.plain_model import write_inputs
from tests.slurm.cluster import Cluster
from tests.slurm.front import ROOT, Front
from tests.slurm.scontrol import wait
from tests.slurm.settings import Settings

pytestmark = pytest.mark.slurm


@pytest.fixture
def accounted(accounted_cluster, tmp_path):
    yield Front(accounted_cluster, tmp_path)
    accounted_cluster.run("scancel --user root")


# ---- one line, exit code 2, nothing left behind


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slurm.partition=mian"], "slurm.partition: no partition 'mian'; did you mean 'main'?"),
        (
            ["slurm.gpus_per_node=9"],
            "slurm.gpus_per_node: no node of the cluster has GPUs in Slurm (gres), but 9 per node",
        ),
        (["slurm.partition=main", "slurm.nodes=9"], "slurm.nodes: 9 nodes, but partition main has only 4"),
        (["slurm.time=9-0"], "slurm.time: 9-0 is longer than the cluster allows; use at most 1-00:00:00"),
        (["slurm.memory=999G"], "slurm.memory: 999G of memory on each node"),
        (["slurm.cpus_per_rank=99"], "slurm.cpus_per_rank: 99 CPUs on each node"),
        (["slurm.constraint=fast"], "slurm.constraint: no node of the cluster has the feature 'fast'"),
        (["slurm.constraint=fast&new"], "slurm.constraint: no node has the features 'fast&new'; see `sinfo"),
        (["slurm.reservation=mine"], "slurm.reservation: no reservation 'mine' is open to you now"),
        (["slurm.exclude=[node99]"], "slurm.exclude: unknown node in 'node99'"),
        (["slurm.sbatch_options.gres=tpu:1"], "slurm.gpus_per_node: this cluster has no such GPUs (gres)"),
        (["slurm.sbatch_options.mem-per-cpu=99G"], "slurm.memory: no node has that much memory"),
        (["slurm.sbatch_options.licenses=a:1"], "slurm.sbatch_options.licenses: no such license"),
        (["slurm.sbatch_options.bogus=1"], "slurm.sbatch_options: this cluster's sbatch has no option 'bogus'"),
        (["slurm.sbatch_options.mail-type=XX"], "slurm.sbatch_options.mail-type: sbatch rejects this value"),
        (["slurm.sbatch_options.distribution=XX"], "slurm.sbatch_options.distribution: sbatch rejects this"),
    ],
)
def test_what_slurm_cannot_give_is_refused(front, overrides, message):
    line = front.error_line(*front.submission(*overrides))
    assert line.startswith(message)
    assert "; " in line, "with a remedy"
    assert front.queue() == []
    assert not front.run_dir.exists()


def test_a_job_that_can_never_start_is_cancelled_and_reported(front):
    # A QoS may allow longer jobs than the partition, so this is left to Slurm to judge.
    words = ["slurm.time=9-0", "slurm.qos=long"]
    line = front.error_line(*front.submission(*words))
    assert "could never start, because it has a longer time than its partition allows (PartitionTimeLimit)" in line
    assert line.startswith("slurm.time: ")
    assert line.endswith("lower it; --keep leaves such a job in the queue")
    wait(lambda: front.queue() == [], "the job is gone")
    shown = front.ok(*front.submission(*words), "--keep")
    assert "has a longer time than its partition allows (PartitionTimeLimit); slurm.time: lower it" in shown
    assert len(front.queue()) == 1


def test_a_job_that_slurm_gives_up_at_once_is_reported(front):
    line = front.error_line(*front.submission("slurm.sbatch_options.deadline=now+1minutes"))
    assert "could never start, because it cannot meet its deadline" in line


def test_nodes_that_are_only_drained_are_waited_for(front):
    """A node that is only down would return with its daemon's next registration."""
    front.cluster.run(["scontrol", "update", "NodeName=node[2-4]", "State=DRAIN", "Reason=test"], check=True)
    try:
        shown = front.ok(*front.submission("slurm.nodes=3"))
        assert "are down, drained or reserved" in shown or "has more nodes than its partition allows" in shown
        assert len(front.queue()) == 1
    finally:
        front.cluster.run(["scontrol", "update", "NodeName=node[2-4]", "State=RESUME"], check=True)


def test_gpus_are_asked_for_by_count_and_type(slurm, tmp_path):
    with Cluster.up(Settings(nodes=1, gpus=2)) as cluster:
        front = Front(cluster, tmp_path)
        words = ["submit", str(front.config), "--entry", "tests.slurm.jobs:sleep", "resources.ranks_per_node=2"]
        line = front.error_line(*words, "slurm.gpu_type=h200")
        assert line == "slurm.gpu_type: no 'h200' GPUs in the cluster; did you mean 'h100'?"
        assert front.error_line(*words, "slurm.gpus_per_node=3").startswith(
            "slurm.gpus_per_node: 3 GPUs on each node, but"
        )
        line = front.error_line(*words, "slurm.sbatch_options.gpus-per-task=1")
        assert line.startswith(
            "slurm.sbatch_options.gpus-per-task: 1 binds each of the 2 ranks of a node to some of its"
        )
        line = front.error_line(*words, "slurm.sbatch_options={gpus-per-task: 9, gpu-bind: none}")
        assert line.startswith(
            "slurm: no node of the partition has the requested resources; request less: its nodes have"
        )
        assert line.endswith("8 CPUs, 8,000 MiB, 2 h100 GPUs")
        job = front.ok(*words, "slurm.gpu_type=h100").split()[2].rstrip(":")
        assert cluster.wait_state(job, "RUNNING")["TresPerNode"] == "gres:gpu:h100:2"
        by_gres = ["slurm.gpu_request=gres", "slurm.gpu_type=h100", f"run_dir={tmp_path / 'gres'}"]
        job = front.ok(*words, *by_gres).split()[2].rstrip(":")
        assert cluster.job(job)["TresPerNode"] == "gres:gpu:h100:2"
        job = front.ok(*words, "slurm.gpu_request=none", f"run_dir={tmp_path / 'none'}").split()[2].rstrip(":")
        assert "TresPerNode" not in cluster.job(job)


def test_runs_that_ask_for_different_things_are_no_array(front):
    first, second = write_inputs(front.folder / "a"), write_inputs(front.folder / "b")
    second.write_text(second.read_text() + "slurm: {time: 30}\n")
    line = front.error_line("submit", "--array", str(first), str(second), "slurm.gpus_per_node=0")
    assert line.startswith("slurm.time: None in 'tiny', 30 in 'tiny', but all jobs of an array have the same")
    line = front.error_line("submit", "--array", str(first), str(first), "slurm.gpus_per_node=0")
    assert line.startswith("run_dir: 'tiny' and 'tiny' would both write to ")
    assert front.queue() == []


# ---- Slurm does not answer


@pytest.mark.parametrize(
    ("fault", "repair", "message"),
    [
        (
            "stop_controller",
            "start_controller",
            "slurm: the controller does not answer (down: login); wait until `scontrol",
        ),
        ("stop_munge", "start_munge", "login: munge, Slurm's authentication service, does not run on this machine"),
    ],
)
def test_a_controller_that_is_down_is_reported_within_two_seconds(front, fault, repair, message):
    """By the time limits of the commands that it runs."""
    code = (
        "import subprocess; from rlhpc.launch.slurm.commands import require_controller\n"
        "run, limits = subprocess.run, []\n"
        "subprocess.run = lambda *words, **more: limits.append(more['timeout']) or run(*words, **more)\n"
        "try: require_controller()\n"
        "finally: print(sum(limits))\n"
    )
    getattr(front.cluster, fault)()
    try:
        assert front.error_line(*front.submission()).startswith(message)
        assert front.error_line("cancel", str(make_known(front))).startswith(message)
        done = front.cluster.run([sys.executable, "-c", code], cwd=ROOT)
    finally:
        getattr(front.cluster, repair)()
    assert done.returncode != 0
    assert 0 < float(done.stdout) < 2


def make_known(front: Front) -> Path:
    """A run folder with a job in it."""
    folder = front.folder / "known"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"job_id": "1", "name": "known"}))
    return folder


def test_a_wrong_slurm_conf_is_reported_at_once(front):
    """Slurm's commands would look for a configuration elsewhere for some ten seconds."""
    began = time.monotonic()
    front.ok(*front.submission(), "--dry-run")
    usual = time.monotonic() - began
    began = time.monotonic()
    line = front.error_line(*front.submission(), env={"SLURM_CONF": "/nowhere/slurm.conf"})
    assert time.monotonic() - began < 5 * usual + 5
    assert line.startswith("SLURM_CONF: no such file '/nowhere/slurm.conf'; correct the variable")
    assert not front.run_dir.exists()


# ---- with an accounting database


def test_accounts_and_qos_are_named(accounted):
    line = accounted.error_line(*accounted.submission("slurm.account=projcet"))
    wrong = "account 'projcet' is unknown, or not available to you in this partition"
    assert line.startswith(f"slurm.account: {wrong}; did you mean 'project'")
    line = accounted.error_line(*accounted.submission("slurm.qos=hgih"))
    assert line.startswith("slurm.qos: QoS 'hgih' is unknown, or not available to you; ")
    assert "normal" in line


def test_a_limit_that_the_job_alone_exceeds_is_distinguished_from_one_that_is_shared(accounted):
    manage = ["sacctmgr", "-i", "modify", "qos", "normal", "set"]
    accounted.cluster.run([*manage, "MaxTRESPerUser=cpu=3"], check=True)
    try:
        line = accounted.error_line(*accounted.submission("slurm.cpus_per_rank=4"))
        assert line.startswith("slurm.cpus_per_rank: job ")
        assert "could never start, because it waits: its QoS limits the CPUs of all your jobs together" in line
        wait(lambda: accounted.queue() == [], "the job is gone")
        first = accounted.submit("sleep", "slurm.cpus_per_rank=2")
        accounted.cluster.wait_state(first, "RUNNING")
        other = [f"run_dir={accounted.folder / 'other'}", "slurm.cpus_per_rank=2"]
        assert "its QoS limits the CPUs of all your jobs together" in accounted.ok(*accounted.submission(*other))
        assert len(accounted.queue()) == 2, "this one waits for the other"
    finally:
        accounted.cluster.run([*manage, "MaxTRESPerUser=cpu=-1"], check=True)

"""Every script of sbatch/, submitted to a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys

import pytest

from tests.helpers import container_runtime, runs
from tests.helpers.fake_driver import gpu_lines
from tests.slurm.cluster import Cluster
from tests.slurm.sbatch_user import CPUS, ROOT, SbatchUser
from tests.slurm.scontrol import wait
from tests.slurm.settings import Settings

pytestmark = pytest.mark.slurm
NOTE = "--entry=tests.slurm.ranks:note"


@pytest.fixture(scope="module")
def large_cluster(slurm):
    """Nodes that have what the templates ask for: 8 GPUs (files only) and 96 cores."""
    with Cluster.up(Settings(nodes=3, gpus=8, cpus=96, memory_mb=40000)) as cluster:
        yield cluster


@pytest.fixture
def user(large_cluster, tmp_path, driver):
    found = SbatchUser(large_cluster, tmp_path)
    (tmp_path / "gpus").write_text(gpu_lines(["ok"] * 8))
    found.environ |= {"LD_LIBRARY_PATH": str(driver), "FAKE_GPUS": str(tmp_path / "gpus")}
    yield found
    large_cluster.heal()


def test_one_node_as_the_template_is(user) -> None:
    job = user.sbatch("grpo.sbatch", NOTE, user.config)
    known = user.ended(job)
    asked = {"NumNodes": "1", "CPUs/Task": "12", "TresPerNode": "gres:gpu:8", "TimeLimit": "1-00:00:00", "Requeue": "1"}
    assert {name: known[name] for name in asked} == asked
    ranks = user.ranks()
    assert [(rank["rank"], rank["world"], rank["local"]) for rank in ranks] == [(n, 8, n) for n in range(8)]
    for name, value in {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "OMP_NUM_THREADS": "12"}.items():
        assert {rank["environ"][name] for rank in ranks} == {value}
    log = user.folder / f"grpo-{job}.log"
    taken = "slurm.nodes=1 resources.ranks_per_node=8 slurm.cpus_per_rank=12 slurm.gpus_per_node=8"
    assert f"rlhpc: taken from the job: {taken}" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600, "as private as the run"
    assert stat.S_IMODE(user.run.stat().st_mode) == 0o700


def test_what_the_command_knows_of_such_a_run(user) -> None:
    job = user.sbatch("--ntasks-per-node=1", *CPUS, "grpo.sbatch", NOTE, user.config)
    user.ended(job)
    command = [sys.executable, "-m", "rlhpc.cli.main"]
    shown = user.cluster.run([*command, "status"], env=user.environ, cwd=user.folder, check=True).stdout
    assert re.search(rf"tiny\s+{job}\s+finished", shown), shown
    logs = user.cluster.run([*command, "logs", str(job), "--job"], env=user.environ, cwd=user.folder, check=True)
    assert "rlhpc: finished" in logs.stdout


def test_several_nodes_train_to_the_end(user) -> None:
    config = runs.write_config(user.folder / "real", train__steps=1, sft__steps=1)
    options = ("--nodes=2", "--ntasks-per-node=1", *CPUS)
    user.ended(user.sbatch(*options, "multi_node.sbatch", config))
    run = user.folder / "real" / "run"
    attempt = json.loads((run / "attempts" / "0001" / "attempt.json").read_text())
    assert (attempt["nodes"], attempt["world_size"]) == (["node1", "node2"], 2)
    steps = [(record["phase"], record["step"]) for record in runs.records(run)]
    assert ("rl", 1) in steps
    assert (run / "report" / "report.html").is_file()


def test_a_job_that_contradicts_the_configuration(user) -> None:
    job = user.sbatch("--nodes=2", "--ntasks-per-node=1", *CPUS, "grpo.sbatch", user.config, "slurm.nodes=4")
    assert user.ended(job, "FAILED")["ExitCode"] == "2:0"
    lines = (user.folder / f"grpo-{job}.log").read_text().splitlines()
    message = (
        "rlhpc: slurm.nodes: 4 in the configuration, but the job has 2; submit with --nodes=4, or add slurm.nodes=2"
    )
    assert lines == [message]
    assert not user.run.exists()


def test_a_job_whose_ranks_would_see_one_gpu_each_is_refused_unless_nothing_binds_them(user) -> None:
    job = user.sbatch("--gpus-per-task=1", "grpo.sbatch", NOTE, user.config)
    user.ended(job, "FAILED")
    message = "rlhpc: --gpus-per-task: 1 binds each of the 8 ranks of a node to some of its GPUs"
    assert message in (user.folder / f"grpo-{job}.log").read_text()
    job = user.sbatch("--gpus-per-task=1", "--gpu-bind=none", "grpo.sbatch", NOTE, user.config)
    user.ended(job)
    visible = {rank["environ"].get("CUDA_VISIBLE_DEVICES") for rank in user.ranks()}
    assert visible <= {None, "0,1,2,3,4,5,6,7"}, "22.05 unsets it, by which all are seen"


def test_two_jobs_do_not_share_a_run_folder(user) -> None:
    words = ("--ntasks-per-node=1", *CPUS, "grpo.sbatch", "--entry=tests.slurm.ranks:second_time", user.config)
    first = user.sbatch(*words)
    wait(lambda: bool(user.ranks()), "the first job's rank")
    second = user.sbatch(*words)
    user.ended(second, "FAILED")
    said = (user.folder / f"grpo-{second}.log").read_text()
    assert f"rlhpc: run_dir: job {first} of this run is running" in said
    assert user.cluster.job(first)["JobState"] == "RUNNING"


def test_a_run_that_ended_is_resumed_by_its_own_config(user) -> None:
    words = ("--ntasks-per-node=1", *CPUS, "grpo.sbatch", "--entry=tests.slurm.ranks:second_time")
    first = user.sbatch(*words, user.config)
    wait(lambda: bool(user.ranks()), "the first job's rank")
    user.cluster.run(["scancel", str(first)], check=True)
    user.ended(first, "CANCELLED")
    wait(lambda: user.cluster.run(["squeue", "-h"]).stdout == "", "the first job's end")
    user.ended(user.sbatch(*words, user.run / "config.yaml"))
    assert [rank["rank"] for rank in user.ranks(attempt=2)] == [0]


def test_the_job_of_several_nodes_may_come_back_on_fewer(user) -> None:
    """As the template says to change it."""
    text = (ROOT / "sbatch" / "multi_node.sbatch").read_text()
    text = re.sub(r"#SBATCH --(ntasks-per-node|cpus-per-task)=.*\n", "", text).replace("--nodes=4", "--nodes=2-3")
    script = user.folder / "elastic.sh"
    script.write_text(text)
    keys = ["slurm.nodes=[2, 3]", "resources.ranks_per_node=2", "slurm.cpus_per_rank=1"]
    options = ("--mincpus=2", "--gpus-per-node=0")
    job = user.sbatch(*options, script, "--entry=tests.slurm.ranks:second_time", user.config, *keys)
    wait(lambda: len(user.ranks()) == 6, "ranks on three nodes")
    user.cluster.run(["scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=test"], check=True)
    try:
        user.cluster.run(["scontrol", "requeue", str(job)], check=True)
        user.ended(job)
    finally:
        user.cluster.run(["scontrol", "update", "NodeName=node3", "State=RESUME"], check=True)
    assert [rank["node"] for rank in user.ranks(attempt=2)] == ["node1", "node1", "node2", "node2"]


# ---- heterogeneous


def test_groups_of_nodes_are_one_world(user) -> None:
    options = ("--ntasks-per-node=2", *CPUS)
    user.ended(user.sbatch(*options, "heterogeneous.sbatch", NOTE, user.config))
    ranks = user.ranks()
    assert [(rank["rank"], rank["world"], rank["local"]) for rank in ranks] == [(n, 6, n % 2) for n in range(6)]
    nodes = json.loads((user.run / "attempts" / "0001" / "attempt.json").read_text())["nodes"]
    assert [rank["node"] for rank in ranks] == [node for node in nodes for _ in range(2)]
    logs = sorted((user.run / "attempts" / "0001" / "logs").iterdir())
    assert [log.name for log in logs] == [f"rank-{number:05d}.log" for number in range(6)]
    assert [json.loads(log.read_text())["rank"] for log in logs] == list(range(6)), "each rank's own log"


@pytest.mark.long
def test_groups_come_back_together(user) -> None:
    options = ("--ntasks-per-node=1", *CPUS)
    program = "--entry=tests.slurm.ranks:second_time"
    job = user.sbatch(*options, "heterogeneous.sbatch", program, user.config)
    wait(lambda: len(user.ranks()) == 3, "the ranks")
    user.cluster.run(["scontrol", "requeue", str(job)], check=True)
    known = user.ended(job)
    assert known["Restarts"] == "1"
    assert [rank["rank"] for rank in user.ranks(attempt=2)] == [0, 1, 2]


def test_the_end_of_a_heterogeneous_job_is_known(user) -> None:
    options = ("--ntasks-per-node=1", *CPUS, "--time=7")
    user.ended(user.sbatch(*options, "heterogeneous.sbatch", NOTE, user.config))
    attempt = json.loads((user.run / "attempts" / "0001" / "attempt.json").read_text())
    deadline = json.loads((user.run / "attempts" / "0001" / "deadline.json").read_text())
    assert 300 < deadline["end"] - attempt["started"] <= 421


# ---- arrays


def test_each_element_is_a_run_of_its_own(user) -> None:
    (user.folder / "changes.txt").write_text("seed=11 train.steps=4\nseed=12\n")
    options = ("--array=1-3", "--ntasks-per-node=1", *CPUS)
    job = user.sbatch(*options, "array.sbatch", user.config, "changes.txt", NOTE, "train.steps=5")
    user.ended(f"{job}_1")
    user.ended(f"{job}_2")
    assert user.ended(f"{job}_3", "FAILED")["ExitCode"] == "2:0"
    assert (user.folder / f"array-{job}_3.log").read_text() == "changes.txt: line 3 is missing\n"
    for element, seed in ((1, 11), (2, 12)):
        run = user.folder / "runs" / f"config-{job}" / str(element)
        assert [rank["rank"] for rank in user.ranks(run)] == [0]
        text = (run / "config.yaml").read_text()
        assert f"\nseed: {seed}\n" in text
        assert "steps: 5\n" in text, "the command line wins"
        assert json.loads((run / "job.json").read_text())["job_id"] == f"{job}_{element}"


@pytest.mark.long
def test_an_element_goes_back_into_the_queue_alone(user) -> None:
    """The last element has the array's own number, and Slurm takes it for the whole array."""
    imported = "from rlhpc.launch.supervise.batch_job import BatchJob as B"
    code = f"{imported}; import os; print(B.from_environ().requeue(()), flush=True)"
    last = '[ "$SLURM_ARRAY_JOB_ID" = "$SLURM_JOB_ID" ] && [ -z "$SLURM_RESTART_COUNT" ]'
    script = f"touch begun-$SLURM_ARRAY_TASK_ID; if {last}; then sleep 1; python -c '{code}'; sleep 60; fi; sleep 12"
    words = ("--array=1-3", "--requeue", f"--wrap={script}")
    job = user.sbatch(*words)
    restarts = [user.ended(f"{job}_{element}")["Restarts"] for element in (1, 2, 3)]
    assert sorted(restarts) == ["0", "0", "1"]


# ---- containers


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed; tests/slurm/install.sh does it")
def test_the_ranks_run_in_the_container(user, driver) -> None:
    """In a folder that a stand-in for Apptainer enters, with rlhpc of its own and the environment of an image."""
    shim = container_runtime.write_program(user.folder / "bin", "apptainer")
    python = os.path.realpath(sys.executable)
    image_environ = {"OMP_NUM_THREADS": "9", "OF_THE_IMAGE": "1", "LD_LIBRARY_PATH": str(driver)}
    image = container_runtime.write_image(user.folder / "image", python, image_environ)
    user.environ["PATH"] = f"{shim.parent}:{user.environ['PATH']}"
    mounts = f'slurm.container.mounts=["{driver}","{user.folder}"]'
    changes = [f"slurm.container.image={image}", f"slurm.container.python={python}", mounts]
    options = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
    user.ended(user.sbatch(*options, "container.sbatch", user.config, *changes, NOTE))
    ranks = user.ranks()
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        found = rank["environ"]
        assert (found["OF_THE_IMAGE"], found["OMP_NUM_THREADS"], found["PYTHONNOUSERSITE"]) == ("1", "1", "1")
        assert found["PYTHONPATH"].startswith(container_runtime.INSIDE)
        assert found["TMPDIR"].startswith("/tmp/rlhpc-")


def test_a_site_without_the_runtime_is_named(user) -> None:
    """By the real srun, which does not have Pyxis; nothing is tried again."""
    changes = ["slurm.container.runtime=pyxis", f"slurm.container.image={user.folder}/image.sqsh"]
    options = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
    user.ended(user.sbatch(*options, "container.sbatch", user.config, *changes, NOTE), "FAILED")
    verdict = json.loads((user.run / "attempts" / "0001" / "verdict.json").read_text())
    assert (verdict["cause"], verdict["action"]) == ("user", "stop")
    assert verdict["message"].startswith(
        "slurm.container.runtime: srun has no --container-image: Pyxis is not installed"
    )
    assert not (user.run / "attempts" / "0002").exists()

"""The script of a job: golden files of whole ones, options, and how ranks get their GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.direct import prepare_folder
from rlhpc.launch.slurm.executor import check_folder_name, script
from rlhpc.launch.slurm.job_spec import binding_option, check_job_binding, make_spec, parse
from tests.helpers.golden import GOLDEN, check_text
from tests.helpers.plain_model import write_inputs

WORKDIR, FOLDER, PYTHON = Path("/home/alice/project"), Path("/scratch/alice/runs/x/submission"), "/opt/venv/bin/python"
EVERYTHING = """
name: all.of-it
model: {path: x}
train: {steps: 1}
resources: {ranks_per_node: 8}
slurm:
  nodes: [2, 4]
  time: 1-12:00:00
  partition: gpu,long
  account: proj
  qos: high
  reservation: maintenance
  constraint: ib&h100
  comment: it's "mine", 100%
  exclude: [node7, "node[9-12]"]
  exclusive: true
  gpu_type: h100
  cpus_per_rank: 12
  memory: 960G
  modules: [cuda/12.8, nccl]
  conda: /envs/my env
  environment: {NCCL_DEBUG: INFO, GREETING: "it's $HOME"}
  setup: [source /site/setup.sh, 'echo "on $(hostname)"']
  sbatch_options: {dependency: "afterok:7", licenses: "a:1", wait_all_nodes: 1, spread-job: true, x11: false}
"""
PLAIN = "name: plain\nmodel: {path: x}\ntrain: {steps: 1}\n"


def config_of(text: str, folder: Path, *overrides: str) -> RunConfig:
    file = folder / "c.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def spec_of(folder: Path, *overrides: str):
    return make_spec(config_of(PLAIN, folder, *overrides), WORKDIR, PYTHON)


def options_of(folder: Path, *overrides: str) -> dict:
    return dict(spec_of(folder, *overrides).options)


@pytest.mark.parametrize(
    ("name", "text", "jobs"),
    [("plain", PLAIN, 1), ("everything", EVERYTHING, 1), ("array", PLAIN, 3)],
)
def test_the_script_is_as_it_was(name, text, jobs, tmp_path, accept_golden):
    config = config_of(text, tmp_path)
    check_text(f"{name}.sbatch", script(make_spec(config, WORKDIR, PYTHON, "/opt/conda"), FOLDER, jobs), accept_golden)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.sbatch")), ids=lambda file: file.stem)
def test_a_script_is_good_bash(file):
    done = subprocess.run(["bash", "-n", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", "-e", "SC1091,SC2016", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"nodes": 1, "ntasks-per-node": 1, "gpus-per-node": 1, "signal": "USR2@120", "requeue": True}),
        (["slurm.gpus_per_node=0"], {"gpus-per-node": None}),
        (["slurm.gpus_per_node=2", "slurm.gpu_type=a100"], {"gpus-per-node": "a100:2"}),
        (["resources.ranks_per_node=8"], {"gpus-per-node": 8, "ntasks-per-node": 8}),
        (["slurm.nodes=[2, 4]"], {"nodes": "2-4"}),
        (["slurm.time=5"], {"signal": "USR2@30", "time": 5}),
        (["slurm.time='0:05'"], {"signal": "USR2@1"}),
        (["slurm.time='2:00:00'"], {"signal": "USR2@120"}),
        (["slurm.sbatch_options={gres: 'gpu:a100:4'}"], {"gpus-per-node": None, "gres": "gpu:a100:4"}),
        (["slurm.gpu_request=gres", "slurm.gpus_per_node=2"], {"gpus-per-node": None, "gres": "gpu:2"}),
        (["slurm.gpu_request=gres", "slurm.gpu_type=a100_1g.5gb"], {"gres": "gpu:a100_1g.5gb:1"}),
        (["slurm.gpu_request=gres", "slurm.sbatch_options={gres: 'gpu:v100:4'}"], {"gres": "gpu:v100:4"}),
        (["slurm.gpu_request=gres", "slurm.sbatch_options={gpus: 8}"], {"gres": None, "gpus": 8}),
        (["slurm.gpu_request=none", "slurm.gpus_per_node=2"], {"gpus-per-node": None, "gres": None}),
        (["slurm.cluster=other"], {"clusters": "other"}),
        (["slurm.sbatch_options={gpus: 8}"], {"gpus-per-node": None, "gpus": 8}),
        (["slurm.memory=1G", "slurm.sbatch_options={mem_per_cpu: 1G}"], {"mem": None, "mem-per-cpu": "1G"}),
        (["slurm.sbatch_options={no-requeue: true}"], {"requeue": None, "no-requeue": True}),
        (["slurm.sbatch_options={dependency: 'afterok:1'}"], {"kill-on-invalid-dep": "yes"}),
        (["slurm.sbatch_options={signal: 'USR2@60'}"], {"signal": "USR2@60"}),
        (["slurm.sbatch_options={wckey: mine}"], {"wckey": "mine"}),
        (["slurm.sbatch_options={exclusive: user}"], {"exclusive": "user"}),
    ],
)
def test_options(overrides, expected, tmp_path):
    found = options_of(tmp_path, *overrides)
    assert {name: found.get(name) for name in expected} == expected


def test_submitits_own_key_is_gone(tmp_path):
    assert "submitit" not in script(spec_of(tmp_path), FOLDER).partition("# command")[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slurm.sbatch_options={nodes: 2}"], "slurm.sbatch_options.nodes: has a key of its own; use slurm.nodes"),
        (["slurm.sbatch_options={--mem: 2}"], "slurm.sbatch_options.--mem: has a key of its own; use slurm.memory"),
        (["slurm.sbatch_options={open_mode: a}"], "slurm.sbatch_options.open_mode: is set by rlhpc itself"),
        (['slurm.comment="a\\n#SBATCH --nice=1"'], "slurm.comment: 'a\\n#SBATCH --nice=1' has more than one line"),
        (['slurm.sbatch_options={mail-user: "a\\nb"}'], "slurm.sbatch_options.mail-user: "),
        (["slurm.srun_options=[--export, MINE=1]"], "slurm.srun_options: --export=MINE=1 keeps variables of the"),
    ],
)
def test_what_would_break_the_script_is_refused(overrides, message, tmp_path):
    with pytest.raises(UserError) as caught:
        spec_of(tmp_path, *overrides)
    assert str(caught.value).startswith(message)


def test_a_folder_that_slurm_would_rewrite_is_refused():
    with pytest.raises(UserError, match="contains a % or a backslash"):
        check_folder_name(Path("/runs/100%j"))


def run_setup(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The lines before the command, in a real shell."""
    lines = make_spec(config_of(PLAIN, folder, *overrides), folder, "/bin/sh").setup
    text = "\n".join(["#!/bin/bash", *lines, "echo reached"])
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )


def test_setup_runs_in_the_working_folder_with_the_environment(tmp_path):
    done = run_setup(tmp_path, 'slurm.environment={A: "it\'s $HOME"}', "slurm.setup=[pwd, 'echo \"$A\"', umask]")
    assert done.stdout.splitlines() == [str(tmp_path), "it's $HOME", "0077", "reached"]
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slurm.modules=[cuda]"], "slurm.modules: this node has no environment modules"),
        (["slurm.conda=mine"], "slurm.conda: there is no conda"),
        (["slurm.setup=['true', 'ls /nowhere 2>/dev/null', 'true']"], "slurm.setup: failed: ls /nowhere 2> /dev/null"),
    ],
)
def test_a_line_that_fails_ends_the_job_and_is_named(overrides, message, tmp_path):
    done = run_setup(tmp_path, *overrides)
    assert done.returncode != 0
    assert "reached" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlhpc: ")
    assert line.endswith(message)


def test_modules_are_found_without_a_login_shell(tmp_path):
    init = tmp_path / "init"
    init.mkdir()
    (init / "bash").write_text('module() { [ "$2" = good ] && echo "loaded $2"; }\n')
    lines = make_spec(config_of(PLAIN, tmp_path, "slurm.modules=[good, bad]"), tmp_path, "/bin/sh").setup
    environ = {"PATH": "/usr/bin:/bin", "MODULESHOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False, env=environ)
    assert done.stdout == "loaded good\n"
    assert done.stderr.endswith("slurm.modules: cannot load bad\n")


def test_a_python_or_folder_that_the_node_lacks_is_named(tmp_path):
    lines = make_spec(config_of(PLAIN, tmp_path), tmp_path, "/nowhere/python").setup
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split(": ", 2)[2]) == (
        1,
        "/nowhere/python is not there; use one that all nodes see\n",
    )
    lines = make_spec(config_of(PLAIN, tmp_path), Path("/nowhere"), "/bin/sh").setup
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert "the working folder /nowhere is not there; use one that all nodes share" in done.stderr


def binding_config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(write_inputs(folder), ["resources.ranks_per_node=8", *overrides])


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, None),
        ({"gres": "gpu:8"}, None),
        ({"gpu-bind": "none"}, None),
        ({"gpu-bind": "verbose,none"}, None),
        ({"gpu-bind": "single:1"}, "gpu-bind"),
        ({"gpu-bind": "v,per_task:1"}, "gpu-bind"),
        ({"gpu-bind": "closest"}, "gpu-bind"),
        ({"gpu-bind": "map_gpu:0,1"}, "gpu-bind"),
        ({"gpus-per-task": "h100:1"}, "gpus-per-task"),
        ({"gpus-per-task": "1", "gpu-bind": "none"}, None),
        ({"ntasks-per-gpu": "1"}, "ntasks-per-gpu"),
        ({"tres-per-task": "cpu:12"}, None),
        ({"tres-per-task": "cpu=12,gres/gpu=1"}, "tres-per-task"),
        ({"tres-per-task": "gres/gpu:1", "tres-bind": "gres/gpu:none"}, None),
        ({"tres-bind": "gres/gpu:single:1"}, "tres-bind"),
        ({"tres-bind": "gres/nic:single:1"}, None),
    ],
)
def test_which_option_binds(options: dict[str, str], found: str | None) -> None:
    assert binding_option(options) == found


def test_srun_s_command_line_is_read_in_both_forms() -> None:
    words = ["--gpu-bind=none", "--gpus-per-task", "2", "-v", "--overlap", "--export=A=1"]
    assert parse(words) == {"gpu-bind": "none", "gpus-per-task": "2", "overlap": "", "export": "A=1"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "slurm.sbatch_options={gpus_per_task: 1}",
            "slurm.sbatch_options.gpus-per-task: 1 binds each of the 8 ranks of a node to some of its GPUs",
        ),
        ("slurm.sbatch_options={gpu-bind: 'single:1'}", "slurm.sbatch_options.gpu-bind: single:1 binds each"),
        ("slurm.srun_options=[--gpu-bind=closest]", "slurm.srun_options: --gpu-bind=closest binds each of the 8 ranks"),
        (
            "slurm.srun_options=[--gpus-per-task, '1']",
            "slurm.srun_options: --gpus-per-task=1 binds each of the 8 ranks",
        ),
    ],
)
def test_a_submission_that_binds_is_refused_with_what_works(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_spec(binding_config(tmp_path, override), tmp_path, "python")
    assert str(caught.value).startswith(message)
    assert "--gpus-per-node=N or --gres=gpu:N, with --gpu-bind=none" in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["slurm.sbatch_options={gpus-per-task: 1, gpu-bind: none}"],
        ["slurm.sbatch_options={gpus-per-task: 1}", "slurm.srun_options=[--gpu-bind=none]"],
        ["slurm.sbatch_options={gpus-per-task: 1}", "resources.ranks_per_node=1"],
        ["slurm.srun_options=[--gpu-bind=single:1]", "slurm.gpus_per_node=0"],
    ],
)
def test_a_submission_whose_ranks_see_all_gpus_is_not(tmp_path: Path, overrides: list[str]) -> None:
    assert make_spec(binding_config(tmp_path, *overrides), tmp_path, "python").options


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_GPU_BIND": "single:1"},
        {"SLURM_TRES_PER_TASK": "cpu:12,gres/gpu:1"},
        {"SLURM_HET_SIZE": "2", "SLURM_GPUS_PER_TASK_HET_GROUP_1": "1"},
    ],
)
def test_a_script_whose_job_binds_is_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"^--[\w-]+: \S+ binds each of the 8 ranks .*; submit with --gpus-per-node=N"):
        check_job_binding(binding_config(tmp_path), environ)
    check_job_binding(binding_config(tmp_path, "slurm.srun_options=[--gpu-bind=none]"), environ)


def test_the_batch_step_looks_at_it_before_it_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "1", "NTASKS_PER_NODE": "2", "GPUS_PER_TASK": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match=r"^--gpus-per-task: 1 binds each of the 2 ranks of a node"):
        prepare_folder(write_inputs(tmp_path), [f"run_dir={run_dir}"])
    assert not run_dir.exists()

"""Which options leave a rank without its node's other GPUs, wherever they are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.direct import prepare_folder
from rlhpc.launch.slurm.job_spec import binding_option, check_job_binding, make_spec, parse
from tests.helpers.plain_model import write_inputs


def config_of(folder: Path, *overrides: str) -> RunConfig:
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
        make_spec(config_of(tmp_path, override), tmp_path, "python")
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
    assert make_spec(config_of(tmp_path, *overrides), tmp_path, "python").options


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
        check_job_binding(config_of(tmp_path), environ)
    check_job_binding(config_of(tmp_path, "slurm.srun_options=[--gpu-bind=none]"), environ)


def test_the_batch_step_looks_at_it_before_it_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "1", "NTASKS_PER_NODE": "2", "GPUS_PER_TASK": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match=r"^--gpus-per-task: 1 binds each of the 2 ranks of a node"):
        prepare_folder(write_inputs(tmp_path), [f"run_dir={run_dir}"])
    assert not run_dir.exists()

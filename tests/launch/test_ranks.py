"""How many ranks a node gets where the config leaves it open: one per GPU, never one of eight silently."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result

from bench.acceptance.runs import configure
from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.launch import machine
from rlhpc.launch.runs.direct import JobShape, overrides_from_job
from rlhpc.launch.runs.submit import make_plan
from tests.helpers.commands import invoke
from tests.helpers.machine import have_gpus
from tests.helpers.plain_model import write_inputs

KEY = "slurm.gpus_per_node"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config without ranks, on a machine with the device files of eight GPUs, all visible."""
    have_gpus(monkeypatch, tmp_path, 8)
    monkeypatch.setenv(env.RLHPC_SITE, "")
    return write_inputs(tmp_path)


def command(*words: object) -> Result:
    return invoke(*words)


@pytest.mark.parametrize(
    ("visible", "ranks", "line"),
    [
        (None, 8, "8 rank(s), one per visible GPU (resources.ranks_per_node is not set)"),
        ("0,3", 2, "2 rank(s), one per visible GPU (resources.ranks_per_node is not set)"),
        ("", 1, "1 rank on the CPU, no GPU is visible (resources.ranks_per_node is not set)"),
    ],
)
def test_a_run_here_takes_the_visible_gpus_and_says_so(
    config: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, ranks: int, line: str
) -> None:
    if visible is not None:
        monkeypatch.setenv(env.CUDA_VISIBLE_DEVICES, visible)
    checked = command("run", config, "--check")
    assert f"layout  {ranks} ranks on 1 node(s): training tp 1 x dp {ranks}" in checked.output
    assert f"ranks   {line}\n" in checked.output


def test_ranks_that_are_set_stay(config: Path) -> None:
    checked = command("run", config, "--check", "resources.ranks_per_node=2")
    assert "layout  2 ranks on 1 node(s)" in checked.output
    assert "ranks   " not in checked.output


def test_an_evaluation_here_takes_the_visible_gpus_too(config: Path) -> None:
    checked = command("eval", config, "--check", f"data.validation.0={config.parent / 'train.jsonl'}")
    assert "layout  8 ranks on 1 node(s)" in checked.output


def script(config: Path, *overrides: str) -> list[str]:
    return make_plan([load_config(config, overrides)], config.parent).script.splitlines()


@pytest.mark.parametrize(("gpus", "tasks"), [(4, 4), (0, 1)])
def test_a_job_has_a_rank_per_gpu_of_the_config_or_the_site_file(config: Path, gpus: int, tasks: int) -> None:
    site = config.parent / "site.yaml"
    site.write_text(f"slurm: {{gpus_per_node: {gpus}}}\n")
    for override in (f"slurm.gpus_per_node={gpus}", f"site={site}"):
        lines = script(config, override)
        assert f"#SBATCH --ntasks-per-node={tasks}" in lines
        assert (f"#SBATCH --gpus-per-node={gpus}" in lines) == bool(gpus)
    assert "#SBATCH --ntasks-per-node=2" in script(config, f"site={site}", "slurm.gpus_per_node=2")


def test_a_job_without_either_stops_with_both_keys(config: Path) -> None:
    with pytest.raises(UserError) as caught:
        script(config)
    assert str(caught.value) == (
        "slurm.gpus_per_node: neither this nor resources.ranks_per_node is set; set slurm.gpus_per_node in the config "
        "or the site file (0: ranks on CPUs), or resources.ranks_per_node"
    )
    lines = script(config, "resources.ranks_per_node=2")
    assert {"#SBATCH --ntasks-per-node=2", "#SBATCH --gpus-per-node=2"} <= set(lines), "one GPU per rank, as before"


def test_a_plan_is_of_the_job_s_ranks(config: Path) -> None:
    assert "layout    8 ranks on 1 node(s)" in command("plan", "run", config, "slurm.gpus_per_node=8").output


def test_a_calibration_is_of_the_run_s_ranks(config: Path) -> None:
    folder = config.parent / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"{config.read_text()}resources: {{ranks_per_node: 5}}\n")
    error = command("plan", "calibrate", config, folder, "--gpu", "h200", "rollout.tp=2").exception
    assert str(error).startswith("rollout.tp: engines of 2 ranks do not divide the 5 ranks of the job")


@pytest.mark.parametrize(
    ("overrides", "from_site", "gpus", "taken"),
    [
        ([], (), 8, ["resources.ranks_per_node=8", "slurm.gpus_per_node=8"]),
        (["slurm.gpus_per_node=4"], (), 8, ["resources.ranks_per_node=4"]),
        (
            ["slurm.gpus_per_node=4"],
            ("slurm.gpus_per_node",),
            8,
            ["resources.ranks_per_node=8", "slurm.gpus_per_node=8"],
        ),
        (["slurm.gpus_per_node=0"], (), 8, []),
        ([], (), None, []),
    ],
)
def test_a_plain_job_without_tasks_has_a_rank_per_gpu(
    config: Path, overrides: list[str], from_site: tuple[str, ...], gpus: int | None, taken: list[str]
) -> None:
    loaded = load_config(config, ["slurm.nodes=1", *overrides])
    assert overrides_from_job(loaded, JobShape(1, None, None, gpus), from_site) == taken


def test_an_acceptance_measures_one_rank_on_a_machine_with_several_gpus(config: Path) -> None:
    fields = {"name": "x", "model": {"path": "model"}, "train": {"steps": 1}}
    assert machine.with_local_ranks(configure(fields)) == (configure(fields), None)
    assert configure(fields).resources.ranks_per_node == 1
    assert configure({**fields, "resources": {"ranks_per_node": 2}}).resources.ranks_per_node == 2

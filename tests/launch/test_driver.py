"""Which CUDA the wheels need, which driver that takes, and where too old a one is named."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.launch import machine
from rlhpc.launch.runs.submit import make_plan
from tests.helpers.machine import have_driver
from tests.helpers.plain_model import write_inputs

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs@host)  Sun Jul 27\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 02:57:01 UTC 2025\nGCC version: 12\n"


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, noted: str = "None", **packages: str) -> None:
    """Make these distributions the installed ones; ``noted`` is what torch/version.py has for CUDA."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in packages:
            raise PackageNotFoundError(name)
        return packages[name.replace("-", "_")]

    folder.mkdir(exist_ok=True)
    (folder / "version.py").write_text(
        f"__version__ = 'x'\ncuda: Optional[str] = {noted}\nhip: Optional[str] = '1.0'\n"
    )
    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace(origin=str(folder / "__init__.py")))


@pytest.mark.parametrize(
    ("packages", "noted", "cuda"),
    [
        ({"torch": "2.11.0+cu130"}, "None", "13.0"),
        ({"torch": "2.9.0+cu128", "vllm": "0.25.0+cu129"}, "None", "12.9"),
        ({"torch": "2.11.0", "vllm": "0.25.0"}, "'13.0'", "13.0"),
        ({"torch": "2.11.0", "nvidia_cuda_runtime": "13.0.96"}, "None", "13.0"),
        ({"torch": "2.8.0", "nvidia_cuda_runtime_cu12": "12.8.90"}, "None", "12.8"),
        ({"torch": "2.13.0+cpu", "nvidia_cuda_runtime": "13.0.96"}, "None", None),
        ({}, "None", None),
    ],
)
def test_the_cuda_of_the_wheels(tmp_path, monkeypatch, packages, noted, cuda) -> None:
    install(monkeypatch, tmp_path / "torch", noted, **packages)
    assert machine.needed_cuda() == cuda


def test_this_python_s_own_wheels_need_no_cuda() -> None:
    assert machine.needed_cuda() is None, "the tests run with PyTorch's CPU build"


@pytest.mark.parametrize(
    ("version", "cuda", "least"),
    [
        ("580.65.06", "13.0", None),
        ("590.10", "13.1", None),
        ("575.57.08", "13.0", "580"),
        ("570.86", "12.9", None),
        ("525.60.13", "12.8", None),
        ("525.60.11", "12.8", "525.60.13"),
        ("470.57", "12.0", "525.60.13"),
        ("580", "14.0", None),
    ],
)
def test_a_driver_runs_all_minor_versions_of_its_cuda(version, cuda, least) -> None:
    assert machine.too_old(version, cuda) == least


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.65.06"), (CLOSED, "570.86.15"), ("", None)])
def test_the_version_is_read_as_the_kernel_has_it(tmp_path, monkeypatch, text, version) -> None:
    have_driver(monkeypatch, tmp_path, text)
    assert machine.installed_driver() == version


def test_a_node_with_too_old_a_driver_names_what_helps(tmp_path, monkeypatch) -> None:
    install(monkeypatch, tmp_path / "torch", torch="2.11.0+cu130")
    have_driver(monkeypatch, tmp_path, CLOSED)
    with pytest.raises(UserError) as caught:
        machine.check_installed_driver("node n7")
    assert str(caught.value) == (
        "node n7: NVIDIA driver 570.86.15 is too old for the installed wheels, built for CUDA 13.0, which needs 580; "
        "update the driver, load NVIDIA's cuda-compat package for CUDA 13, "
        "or install wheels of PyTorch and vLLM built for CUDA 12"
    )
    monkeypatch.setattr(machine, "_library_cuda", lambda: 13)
    machine.check_installed_driver("node n7")  # with NVIDIA's library for forward compatibility


def gpu_config(folder: Path, *overrides: str) -> RunConfig:
    site = folder / "gpus.yaml"
    site.write_text('gpus:\n  h100: {driver: "570.86"}\n')
    return load_config(
        write_inputs(folder), [f"site.file={site}", "slurm.gpu_type=h100", "resources.ranks_per_node=1", *overrides]
    )


def test_a_submission_to_gpus_with_too_old_a_driver_is_refused(tmp_path, monkeypatch) -> None:
    install(monkeypatch, tmp_path / "torch", torch="2.11.0+cu130")
    with pytest.raises(UserError, match=r"site\.gpus\.h100\.driver: NVIDIA driver 570\.86 is too old for the"):
        make_plan([gpu_config(tmp_path)], tmp_path)


def test_each_run_of_an_array_is_looked_at(tmp_path, monkeypatch) -> None:
    install(monkeypatch, tmp_path / "torch", torch="2.11.0+cu130")
    (tmp_path / "b").mkdir()
    second = gpu_config(tmp_path / "b", "slurm.srun_options=[--gpu-bind=closest]", "resources.ranks_per_node=2")
    first = gpu_config(tmp_path, "site.file=null", "resources.ranks_per_node=2", "run_dir=a")
    with pytest.raises(UserError, match=r"slurm\.srun_options: --gpu-bind=closest binds each of the 2 ranks"):
        make_plan([first, second], tmp_path)
    second = gpu_config(tmp_path / "b", "resources.ranks_per_node=2")
    with pytest.raises(UserError, match="NVIDIA driver"):
        make_plan([first, second], tmp_path)


@pytest.mark.parametrize(
    "override",
    ["slurm.gpus_per_node=0", "slurm.conda=other", "slurm.gpu_type=h200", "site.file=null"],
)
def test_what_is_not_known_of_a_submission_is_left_to_the_node(tmp_path, monkeypatch, override) -> None:
    install(monkeypatch, tmp_path / "torch", torch="2.11.0+cu130")
    machine.check_planned_driver(gpu_config(tmp_path, override))

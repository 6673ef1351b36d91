"""The installed package: a wheel of it, in a folder that has nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlhpc import __version__

ROOT = Path(__file__).parents[2]
_NO_CACHE = shutil.ignore_patterns("__pycache__")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the build reads, without network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "rlhpc", source / "rlhpc", ignore=_NO_CACHE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel's files, found before the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    _pip("install", "--no-compile", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _pip(command: str, *arguments: str) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", command, *options, *arguments], check=True)


def rlhpc(installed: Path, *arguments: str) -> str:
    """Output of the installed command."""
    command = [sys.executable, str(installed / "bin" / "rlhpc"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.heavy
def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("rlhpc/")}
    files = (file for file in (ROOT / "rlhpc").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert packed == {file.relative_to(ROOT).as_posix() for file in files}


@pytest.mark.heavy
def test_commands_of_a_wheel_need_no_checkout(installed: Path, bare: Path) -> None:
    assert "configs" in rlhpc(installed, "--help")
    for name in ("qwen2.5-7b-1node", "slurm_demo"):
        (bare / f"{name}.yaml").write_text(rlhpc(installed, "configs", name))
    assert str(installed) in (bare / "qwen2.5-7b-1node.yaml").read_text()
    assert "memory" in rlhpc(installed, "plan", "run", "qwen2.5-7b-1node.yaml")
    assert "#SBATCH --nodes=2" in rlhpc(installed, "submit", "slurm_demo.yaml", "--dry-run").splitlines()


@pytest.mark.ranks
@pytest.mark.vllm
def test_the_demo_of_a_wheel_trains(installed: Path, bare: Path) -> None:
    (bare / "demo.yaml").write_text(rlhpc(installed, "configs", "demo"))
    short = ["sft.steps=1", "train.steps=1", "train.prompts_per_step=4", "validation.max_prompts=4"]
    rlhpc(installed, "run", "demo.yaml", "resources.ranks_per_node=1", *short)
    records = [json.loads(line) for line in (bare / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert [(record["phase"], record["step"]) for record in records if "loss" in record] == [("sft", 1), ("rl", 1)]
    assert "uPlot" in (bare / "runs/demo/report/report.html").read_text()


def acceptance(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Acceptance of this checkout, run in it, beside the installed rlhpc."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "bench.acceptance", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def marked(installed: Path, tmp_path: Path) -> Path:
    """A copy of the installed package that prints a line where it is imported."""
    copy = tmp_path / "marked"
    shutil.copytree(installed, copy)
    with open(copy / "rlhpc" / "__init__.py", "a") as file:
        file.write('import sys\n\nprint("the installed rlhpc", file=sys.stderr)\n')
    return copy


@pytest.mark.heavy
def test_acceptance_measures_the_installed_rlhpc_of_its_version(marked: Path, tmp_path: Path) -> None:
    listed = acceptance(marked, "--list")
    assert (listed.returncode, listed.stderr) == (0, "the installed rlhpc\n")
    package = marked / "rlhpc" / "__init__.py"
    # of another length: a file changed within a second at one size would be run from its former bytecode
    package.write_text(package.read_text().replace(f'"{__version__}"', '"0.0.99"'))
    other = acceptance(marked, str(tmp_path / "out"))
    assert other.returncode == 2
    assert other.stderr.splitlines()[1:] == [
        f"acceptance: rlhpc 0.0.99 is installed, this checkout is of {__version__}"
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_part_and_its_ranks_use_the_installed_rlhpc(marked: Path, tmp_path: Path) -> None:
    """The demo's ranks run in the launcher, the part's own process is a child of the driver."""
    done = acceptance(marked, str(tmp_path / "out"), "--size", "tiny", "--part", "weight_sync")
    assert done.returncode == 0, done.stdout
    output = (tmp_path / "out" / "acceptance.log").read_text()
    assert "the installed rlhpc" in output

"""``rlhpc convert``: what it prints, what it refuses, and what it does not need."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_light import HEAVY, modules_after
from tests.convert import deepseek
from tests.helpers.commands import rlhpc
from tests.helpers.tiny_models import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", "qwen3moe")


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return rlhpc("convert", *arguments)


def refusal(*arguments: object) -> str:
    """The one line of a command that is refused."""
    done = convert(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line.removeprefix("rlhpc: ")


def test_help_imports_only_click() -> None:
    assert not modules_after("convert", "hf-to-megatron", "--help") & {*HEAVY, "numpy", "pydantic"}


@pytest.mark.heavy
def test_only_megatron_s_files_need_torch(tmp_path: Path, model: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    light = modules_after("convert", "hf-to-megatron", str(model), str(there), "--dry-run")
    assert not light & {*HEAVY, "numpy", "pydantic"}, "half of the time until the first byte"
    assert "torch" in modules_after("convert", "hf-to-megatron", str(model), str(there), "--tp", "2", "--ep", "2")
    for command in (
        ("megatron-to-hf", there, back),
        ("reshard", there, tmp_path / "other", "--tp", 4, "--dry-run"),
        ("verify", model, there),
    ):
        assert not modules_after("convert", *map(str, command)) & {*HEAVY}


def test_weights_outside_the_index_are_a_warning(tmp_path: Path, model: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    stray = source / "model-00009-of-00009.safetensors"
    shutil.copy(source / "model.safetensors", stray)
    done = convert("hf-to-megatron", source, tmp_path / "there", "--dry-run")
    assert (done.returncode, done.stderr) == (0, f"rlhpc: warning: {stray}: not in the index, and not converted\n")


@pytest.mark.heavy
def test_a_fault_is_printed_and_the_exit_code_says_so(tmp_path: Path, model: Path) -> None:
    there = tmp_path / "there"
    assert convert("hf-to-megatron", model, there).returncode == 0
    same = convert("verify", model, there)
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "equal")
    with open(there / "release" / "__0_0.distcp", "r+b") as file:
        file.seek(5000)
        file.write(b"\x55\xaa")
    other = convert("verify", model, there)
    assert other.returncode == 1
    assert "__0_0.distcp: the chunk at byte 0 is damaged (Bad CRC-32 for file 'archive/data/0')" in other.stdout


@pytest.mark.heavy
def test_a_second_time_there_is_nothing_to_do(tmp_path: Path, model: Path) -> None:
    assert convert("hf-to-megatron", model, tmp_path / "there").returncode == 0
    again = convert("hf-to-megatron", model, tmp_path / "there")
    assert (again.returncode, "already exists, made from the same" in again.stdout) == (0, True)
    assert "replace it with --force" in refusal("hf-to-megatron", model, tmp_path / "there", "--tp", 2)
    assert convert("hf-to-megatron", model, tmp_path / "there", "--tp", 2, "--force").returncode == 0


@pytest.mark.heavy
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, model: Path) -> None:
    target = tmp_path / "target"
    assert refusal("hf-to-megatron", model, target, "--tp", 3).startswith("--tp: 3 does not divide the model's 4")
    assert refusal("hf-to-megatron", model, target, "--ep", 3).startswith("--ep: 3 does not divide the model's 4 exp")
    assert refusal("hf-to-megatron", tmp_path / "none", target).endswith("no such folder; pass the folder of a model")
    assert "is no checkpoint; use `rlhpc convert hf-to-megatron`" in refusal("reshard", model, target)
    assert not target.exists()


def test_pickles_are_refused_with_a_safe_way_out(tmp_path: Path, model: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + b"harm'\ntR.")
    line = refusal("hf-to-megatron", tmp_path / "model", tmp_path / "target")
    assert "contains pytorch_model.bin, a pickle" in line
    assert "download the model's safetensors" in line


@pytest.mark.heavy
def test_an_index_that_names_a_program_is_not_opened(tmp_path: Path, model: Path) -> None:
    """torch's own reader would run it."""
    there = tmp_path / "there"
    assert convert("hf-to-megatron", model, there).returncode == 0
    harm = tmp_path / "harm"
    (there / "release" / ".metadata").write_bytes(f"cposix\nsystem\n(S'touch {harm}'\ntR.".encode())
    assert "names posix.system, which is not part of the format" in refusal("megatron-to-hf", there, tmp_path / "back")
    assert not harm.exists()


@pytest.mark.heavy
def test_the_tools_are_the_same_commands(tmp_path: Path, model: Path) -> None:
    for tool, source, target in (("hf_to_megatron", model, "there"), ("megatron_to_hf", tmp_path / "there", "back")):
        script = ROOT / "tools" / f"convert_{tool}.py"
        subprocess.run([sys.executable, script, source, tmp_path / target], cwd=tmp_path, check=True)
    assert convert("verify", model, tmp_path / "back").returncode == 0


@pytest.mark.heavy
def test_deepseek_v3_is_planned_from_its_headers_in_seconds(tmp_path: Path) -> None:
    """The published names, types and shapes in 158 files: 671 B parameters, 685 B with the layers that are left out."""
    assert deepseek.write(tmp_path / "model") == 684_489_845_504
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    layout = ("--tp", 4, "--pp", 4, "--last-stage-layers", 13, "--ep", 8)
    done = convert("hf-to-megatron", tmp_path / "model", tmp_path / "target", *layout, "--dry-run")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert "671,026,419,200 parameters" in done.stdout
    assert "1.342 TB of BF16, F32: torch_dist in chunks of tp 4 x pp 4 (last stage of 13)" in done.stdout
    assert "45032 tensors in fp8 are dequantized with their scales" in done.stdout

"""The command line where only what `pip install rlhpc` brings is installed: no torch, numpy or matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.plain_model import write_inputs, write_model

ROOT = Path(__file__).parents[2]
CODE = """
import sys
for name in ("torch", "megatron", "vllm", "numpy", "matplotlib"):
    sys.modules[name] = None  # as if it were not installed
from rlhpc.cli.main import main
main()
"""


def call(folder: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", CODE, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout, done.stderr


def test_a_conversion_says_what_it_needs(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    code, _, errors = call(tmp_path, "convert", "hf-to-megatron", "model", "made")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert errors.startswith("rlhpc: numpy is not installed in ")


def test_a_run_is_refused_before_its_ranks_start(tmp_path: Path) -> None:
    code, _, errors = call(tmp_path, "run", str(write_inputs(tmp_path)))
    assert (code, len(errors.splitlines())) == (2, 1)
    assert f"{sys.executable}: torch, megatron, vllm not installed; use an environment that has them" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.heavy
def test_a_submission_warns_of_what_the_job_would_start_with(tmp_path: Path) -> None:
    config = str(write_inputs(tmp_path))
    message = f"slurm.conda: {sys.executable}, which the job starts its ranks with, has no torch, megatron, vllm"
    code, _, errors = call(tmp_path, "submit", config, "--dry-run", "slurm.gpus_per_node=1")
    assert (code, message in errors) == (0, True)
    code, _, errors = call(tmp_path, "submit", config, "--dry-run", "slurm.gpus_per_node=1", "slurm.conda=trained")
    assert (code, message in errors) == (0, False)

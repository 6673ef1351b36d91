"""The command line imports nothing heavy for help, checks or the schema, and works where only rlhpc is installed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.plain_model import write_inputs, write_model

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "transformers", "megatron")
CODE = """
import sys
from rlhpc.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("loaded:", *sorted({name.split(".")[0] for name in sys.modules}))
"""


def modules_after(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].removeprefix("loaded: ").split())


@pytest.mark.heavy
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["submit", "--help"],
        ["status", "--help"],
        ["plan", "--help"],
        ["plan", "search", "--help"],
        ["configs"],
    ],
)
def test_help_imports_only_click(arguments):
    assert not modules_after(*arguments) & {*HEAVY, "numpy", "pydantic", "yaml", "rich", "submitit"}


def test_a_check_imports_nothing_heavy(tmp_path):
    config = write_inputs(tmp_path)
    assert not modules_after("run", str(config), "--check") & {*HEAVY, "submitit", "rich"}


def test_a_plan_imports_nothing_heavy(tmp_path):
    config = write_inputs(tmp_path)
    assert not modules_after("plan", "run", str(config)) & {*HEAVY, "submitit"}


@pytest.mark.heavy
def test_a_dry_run_of_a_submission_imports_nothing_heavy(tmp_path):
    config = write_inputs(tmp_path)
    assert not modules_after("submit", str(config), "--dry-run", "slurm.gpus_per_node=1") & {*HEAVY, "numpy", "rich"}
    assert not (tmp_path / "run").exists()


def work(command: list[str]) -> float:
    """Seconds of processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def least_work(first: list[str], second: list[str]) -> tuple[float, float]:
    """Of two commands in turn, the least of some runs: other tests use the same cores, and change their speed."""
    firsts, seconds = zip(*[(work(first), work(second)) for _ in range(6)], strict=True)
    return min(firsts), min(seconds)


@pytest.mark.heavy
def test_a_dry_run_answers_at_once(tmp_path):
    """Half a second of work on a usual machine: three times what its libraries' import takes on any.

    The first of the runs may have to compile modules.
    """
    config = write_inputs(tmp_path)
    libraries = [sys.executable, "-c", "import click, pydantic.types, submitit, yaml"]
    command = [sys.executable, "-m", "rlhpc.cli.main", "submit", str(config), "--dry-run", "slurm.gpus_per_node=1"]
    least, used = least_work(libraries, command)
    print(f"{used:.2f} s, libraries {least:.2f} s")
    assert used < 3 * least


@pytest.mark.heavy
def test_the_schema_imports_nothing_heavy():
    assert not modules_after("schema") & {*HEAVY, "submitit", "rich"}


def test_the_launcher_itself_imports_no_torch():
    code = "import sys, rlhpc.launch.runs.run; print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & set(HEAVY)


LOGIN_CODE = """
import sys
for name in ("torch", "megatron", "vllm", "numpy", "matplotlib"):
    sys.modules[name] = None  # as if it were not installed
from rlhpc.cli.main import main
main()
"""


def call(folder: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", LOGIN_CODE, *arguments]
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

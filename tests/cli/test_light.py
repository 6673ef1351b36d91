"""The command line answers at once: nothing heavy is imported for help, for checks or for the schema."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.plain_model import write_inputs

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

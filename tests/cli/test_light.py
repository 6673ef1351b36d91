"""The command line answers at once: nothing heavy is imported for help, for checks or for the schema."""

from __future__ import annotations

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


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_help_imports_only_click(arguments):
    assert not modules_after(*arguments) & {*HEAVY, "numpy", "pydantic", "yaml", "rich", "submitit"}


def test_a_check_imports_nothing_heavy(tmp_path):
    config = write_inputs(tmp_path)
    assert not modules_after("run", str(config), "--check") & {*HEAVY, "submitit", "rich"}


def test_the_schema_imports_nothing_heavy():
    assert not modules_after("schema") & {*HEAVY, "submitit", "rich"}


def test_the_launcher_itself_imports_no_torch():
    code = "import sys, rlhpc.launch.run; print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & set(HEAVY)

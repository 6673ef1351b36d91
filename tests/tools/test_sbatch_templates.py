"""sbatch/ is what the tool writes, and valid bash."""

from __future__ import annotations

import difflib
import shutil
import subprocess

import pytest

from tools.sbatch_templates import FOLDER, TEMPLATES


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_as_rendered(name: str) -> None:
    file, found = FOLDER / name, TEMPLATES[name]()
    there = file.read_text() if file.exists() else ""
    if there != found:
        lines = difflib.unified_diff(
            there.splitlines(), found.splitlines(), f"sbatch/{name}", "as rendered", lineterm=""
        )
        hint = "sbatch/ is written by tools/sbatch_templates.py; to accept: python -m tools.sbatch_templates"
        pytest.fail("\n".join([*lines, hint]), pytrace=False)


def test_there_is_no_other_template() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n", FOLDER / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_shellcheck_finds_nothing(name: str) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed; tests/slurm/install.sh installs it")
    done = subprocess.run(["shellcheck", FOLDER / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", TEMPLATES)
def test_options_come_before_the_first_command(name: str) -> None:
    """sbatch silently ignores those after it."""
    lines = (FOLDER / name).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    assert sum(line.startswith("#SBATCH") for line in lines[:first]) >= 9

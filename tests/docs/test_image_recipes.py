"""The recipes of an image: linted, and one as the other. No image is built here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

DOCKERFILE, DEFINITION = DOCS / "examples" / "Dockerfile", DOCS / "examples" / "rlhpc.def"


def sections() -> dict[str, str]:
    """Sections of Apptainer's definition file by their names; the header is that without one."""
    head, *parts = re.split(r"^%(\w+)\n", DEFINITION.read_text(), flags=re.M)
    return {"": head, **dict(zip(parts[::2], parts[1::2], strict=True))}


def test_the_dockerfile_passes_hadolint() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed; `make venv` does it")
    done = subprocess.run([program, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_definition_has_the_sections_of_apptainer() -> None:
    found = sections()
    assert list(found) == ["", "files", "post", "environment", "test"]
    head = dict(line.split(": ") for line in found[""].splitlines() if line and not line.startswith("#"))
    assert head == {"Bootstrap": "docker", "From": "python:3.12-slim-bookworm"}


@pytest.mark.parametrize("name", ["post", "environment", "test"])
def test_a_script_of_the_definition_passes_shellcheck(name) -> None:
    """Apptainer runs it with the image's sh."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    command = ["shellcheck", "--shell=sh", "--enable=check-unassigned-uppercase", "-"]
    done = subprocess.run(command, input=sections()[name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_files_that_go_into_the_image_are_in_the_checkout() -> None:
    copied = [line.split()[1:-1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")]
    docker = {source for sources in copied for source in sources}
    apptainer = dict(line.split() for line in sections()["files"].splitlines() if line.strip())
    assert docker == set(apptainer)
    assert [source for source in docker if not (ROOT / source).exists()] == []
    assert {Path(target).name == Path(source).name for source, target in apptainer.items()} == {True}


def test_both_recipes_install_the_same() -> None:
    def lines(text: str) -> list[str]:
        joined = re.sub(r"\\\n\s*", "", text).replace("&& ", "\n")
        commands = [line.strip().removeprefix("RUN ") for line in joined.splitlines()]
        return [line for line in commands if line.startswith(("apt-get", "python3 -m pip"))]

    assert lines(DOCKERFILE.read_text()) == lines(sections()["post"])
    assert len(lines(DOCKERFILE.read_text())) == 4
    base = re.search(r"^FROM (.*)$", DOCKERFILE.read_text(), re.M)
    assert base is not None
    assert f"From: {base[1]}" in sections()[""]

"""``rlhpc report`` and ``rlhpc note``."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.observe.notes import LONGEST, MOST_BYTES, add_note
from tests.helpers.commands import invoke
from tests.observe.page.made_runs import Size, make_run

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pyarrow", "matplotlib", "megatron", "vllm")


def call(*arguments: str) -> str:
    done = invoke(*arguments, catch_exceptions=False, standalone_mode=False)
    return done.output


def texts(page: Path) -> dict[str, Any]:
    packed = re.search(r'id="texts">([^<]*)<', page.read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "my-run", Size(steps=8))


def test_a_page_is_written_into_the_run_folder(run: RunFolder) -> None:
    assert call("report", str(run.path)) == f"{run.page}\n"
    (found,) = texts(run.page)["runs"]
    assert (found["name"], found["done"]) == ("my-run", {"rl": 8})


def test_several_runs_are_on_one_page_each_once(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_run(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert call("report", "my-run", str(other.path), "my-run") == "report.html\n"
    page = texts(tmp_path / "report.html")
    assert [found["name"] for found in page["runs"]] == ["my-run", "other"]
    assert page["runs"][0]["files"][0] == ["folder", "./my-run"]


def test_a_page_elsewhere_links_to_the_run(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    call("report", str(run.path), "--out", str(tmp_path / "pages" / "x.html"))
    (found,) = texts(tmp_path / "pages" / "x.html")["runs"]
    assert ["config.yaml", "./../my-run/config.yaml"] in found["files"]


@pytest.mark.parametrize(("out", "problem"), [("absent/x.html", "its folder does not exist"), (".", "is a folder")])
def test_a_place_that_cannot_be_written_is_named(run: RunFolder, tmp_path: Path, out: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"--out .*: {problem}"):
        call("report", str(run.path), "--out", str(tmp_path / out))


def test_an_unknown_run_is_named() -> None:
    with pytest.raises(UserError, match="no such run"):
        call("report", "absent")


@pytest.mark.heavy
def test_a_login_node_writes_it(run: RunFolder) -> None:
    """Where only what `pip install rlhpc` brings is installed."""
    absent = "; ".join(f"sys.modules[{name!r}] = None" for name in HEAVY)
    code = f"import sys; {absent}; from rlhpc.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run.path)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{run.page}\n", "")


def test_a_note_is_on_the_page_at_the_step_at_which_it_was_written(run: RunFolder) -> None:
    run.notes.unlink()
    assert (
        call("note", str(run.path), "halved the <b>rate</b>, token=hf_abcdefghijklmnopqrst")
        == "my-run: note after rl step 8\n"
    )
    assert stat.S_IMODE(run.notes.stat().st_mode) == 0o600
    call("report", str(run.path))
    page = texts(run.page)
    kind = page["kinds"].index("note")
    notes = [mark for mark in page["runs"][0]["marks"] if mark[0] == kind]
    assert [(mark[2], mark[3], mark[4]) for mark in notes] == [("rl", 8, "halved the <b>rate</b>, token=***")]


@pytest.mark.parametrize(
    ("text", "problem"), [(" \n", "is empty"), ("x" * (LONGEST + 1), f"has {LONGEST + 1} characters")]
)
def test_a_note_has_a_bound(run: RunFolder, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        add_note(run, text)


def test_the_file_of_notes_has_a_bound(run: RunFolder) -> None:
    os.truncate(run.notes, MOST_BYTES - 50)
    with pytest.raises(UserError, match="is full: 1 MiB"):
        add_note(run, "one more")
    assert run.notes.stat().st_size == MOST_BYTES - 50

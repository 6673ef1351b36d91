"""The run folder: which folders it may be in, and which modes it sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_new_folder_is_private_from_the_start(tmp_path):
    RunFolder(tmp_path / "runs" / "mine").create()
    assert mode(tmp_path / "runs" / "mine") == 0o700
    assert mode(tmp_path / "runs") == 0o777 & ~_umask()


def test_a_folder_that_is_not_a_runs_keeps_its_mode(tmp_path):
    shared = tmp_path / "group"
    shared.mkdir()
    shared.chmod(0o2755)
    (shared / "checkpoints").mkdir()  # of another program
    run = RunFolder(shared)
    run.check_own()
    run.create()
    assert mode(shared) == 0o2755


def test_a_folder_of_an_earlier_run_is_made_private(tmp_path):
    run = RunFolder(tmp_path / "run").create()
    run.path.chmod(0o755)  # by an administrator's script, or an earlier version
    run.create()
    assert mode(run.path) == 0o700


@pytest.mark.parametrize("bits", [0o775, 0o757, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, bits):
    shared = tmp_path / "group"
    shared.mkdir()
    shared.chmod(bits)
    with pytest.raises(UserError, match=r"run_dir: others can write to '.*group'; .*group/") as caught:
        RunFolder(shared).check_own()
    assert "\n" not in str(caught.value)
    assert mode(shared) == bits


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match=r"run_dir: .*run' is not a folder"):
        RunFolder(tmp_path / "run").check_own()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "histograms.jsonl", "timeline.jsonl"])
def test_a_file_that_a_run_would_overwrite_is_refused(tmp_path, name):
    run = RunFolder(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=f"run_dir: .*{name}' was not written by a run"):
        run.check_own()


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now

"""The run folder: places, modes, and comparison of folders by inode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from rlhpc.core.files import contains, is_same, resolved
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


ROOT = Path(__file__).parents[2]


def test_names_of_one_folder(tmp_path: Path) -> None:
    (tmp_path / "one" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("one")
    assert is_same(tmp_path / "link", tmp_path / "one")
    assert contains(tmp_path / "one", tmp_path / "link" / "inner" / "new" / "newer")
    assert contains(tmp_path / "link", tmp_path / "one")
    assert not contains(tmp_path / "one" / "inner", tmp_path / "one")
    assert not contains(tmp_path / "one" / "inner", tmp_path / "one" / "inner2")


def test_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert not is_same(tmp_path / "none", tmp_path / "none")
    assert not contains(tmp_path / "none", tmp_path / "none" / "inner")


def test_a_loop_of_links_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert not contains(resolved(tmp_path / "loop"), tmp_path)
    assert contains(tmp_path, tmp_path / "loop" / "new")


def test_one_folder_with_two_device_numbers(tmp_path: Path) -> None:
    """As where a network file system is mounted twice with other options; here through an overlay."""
    code = """
import os
from pathlib import Path
from rlhpc.core.files import contains, is_same
assert os.stat("one/inner").st_dev != os.stat("over/inner").st_dev
assert is_same(Path("one/inner"), Path("over/inner"))
assert contains(Path("one/inner"), Path("over/inner/new"))
assert not is_same(Path("one/inner"), Path("over/other"))
print("same")
"""
    for folder in ("one/inner", "one/other", "empty", "over"):
        (tmp_path / folder).mkdir(parents=True)
    mount = "mount -t overlay overlay -o lowerdir=one:empty over"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.strip()}")
    assert done.stdout == "same\n", done.stderr

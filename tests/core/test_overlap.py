"""Folders are compared by inode, by any of their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.core.files import contains, is_same, resolved

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

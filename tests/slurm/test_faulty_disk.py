"""The file system of the fault tests fails on demand, for every process, and works again."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.faulty_disk import FaultyDisk, State, possible

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(not possible(), reason="needs root and FUSE")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    found = FaultyDisk(tmp_path / "source", tmp_path / "mount")
    yield found
    found.close()


def test_calls_fail_until_the_disk_works_again(disk: FaultyDisk, tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    (folder / "file").write_text("kept")
    disk.set(State(errno.ESTALE))
    assert "Stale file handle" in subprocess.run(["stat", folder], capture_output=True, text=True, check=False).stderr
    disk.set(State(errno.EROFS, "writes"))
    assert (folder / "file").read_text() == "kept"
    with pytest.raises(OSError, match="Read-only file system"):
        (folder / "new").write_text("")
    disk.set(State())
    (folder / "new").write_text("")


def test_an_fsync_that_fails_loses_what_was_not_stored(disk: FaultyDisk, tmp_path: Path) -> None:
    with open(tmp_path / "mount" / "file", "wb", buffering=0) as file:
        file.write(b"stored")
        os.fsync(file.fileno())
        disk.set(State(errno.EIO, "syncs"))
        file.write(b", lost")
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(file.fileno())
    assert (tmp_path / "mount" / "file").read_bytes() == b"stored"


def test_a_slow_disk_takes_its_time(disk: FaultyDisk, tmp_path: Path) -> None:
    disk.set(State(delay=0.2))
    began = time.monotonic()
    os.stat(tmp_path / "mount")
    assert time.monotonic() - began > 0.2

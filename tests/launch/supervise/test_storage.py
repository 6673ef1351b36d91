"""A file system that fails under a run: the launcher and its ranks wait for it, up to a limit."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.core.attempts import folders, read_verdict
from rlhpc.core.exits import read_exits, read_starts
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.supervise.hang_watch import HangLimits, HangWatch
from tests.helpers.failing_storage import FailingStorage, possible
from tests.helpers.waiting import PATIENCE, until
from tests.launch.supervise.test_hang_watch import Clock, write

needs_seccomp = pytest.mark.skipif(not possible(), reason="this kernel has no seccomp notifications")
LAUNCHER = """
import sys
from pathlib import Path
from rlhpc.config.load import load_config
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.local import run_local
folder = Path(sys.argv[1])
sys.exit(run_local(load_config(folder / "given.yaml"), RunFolder(folder / "run"), entry=sys.argv[2]))
"""
PROGRAM = "tests.launch.programs:work_until_told"


@pytest.fixture
def failing(tmp_path: Path) -> FailingStorage:
    """The folder of a run's attempts: their records, heartbeats and exit records."""
    return FailingStorage(tmp_path / "run" / "attempts", tmp_path)


def launch(folder: Path, **recovery: float) -> list[str]:
    """The command of a launcher with two ranks."""
    lines = ("name: tiny", "model: {path: none}", "train: {steps: 1}", "resources: {ranks_per_node: 2}")
    (folder / "given.yaml").write_text("\n".join([*lines, f"recovery: {json.dumps(recovery)}"]) + "\n")
    return [sys.executable, "-c", LAUNCHER, str(folder), PROGRAM]


def steps(attempt: AttemptFolder, rank: int) -> list[int]:
    file = attempt.path / f"steps-{rank}.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    """Until the condition holds, or the process has ended."""
    until(lambda: condition() or process.poll() is not None)


@pytest.mark.ranks
@needs_seccomp
def test_a_file_system_that_fails_for_moments_costs_a_run_nothing(tmp_path: Path, failing: FailingStorage) -> None:
    """When the attempt begins, in the middle, and when the ranks leave their records and the launcher its verdict."""
    attempt = RunFolder(tmp_path / "run").attempt(1)

    def waits_for(error: int) -> bool:
        return f"{os.strerror(error)}; waiting up to 300 s for the file system" in (tmp_path / "message").read_text()

    with (
        open(tmp_path / "message", "w") as message,
        failing.running(launch(tmp_path), stderr=message, stdout=subprocess.DEVNULL) as launcher,
    ):
        failing.fail(errno.ESTALE)
        wait_until(lambda: waits_for(errno.ESTALE) and failing.failed.total() > 2, launcher)
        failing.work()
        wait_until(lambda: all(len(steps(attempt, rank)) > 5 for rank in (0, 1)), launcher)
        before = failing.failed.total()
        failing.fail(errno.EIO)
        wait_until(lambda: waits_for(errno.EIO) and failing.failed.total() > before + 10, launcher)
        failing.work()
        taken = [len(steps(attempt, rank)) for rank in (0, 1)]
        wait_until(lambda: all(len(steps(attempt, rank)) > taken[rank] + 5 for rank in (0, 1)), launcher)
        failing.fail(errno.EROFS)
        (tmp_path / "enough").touch()
        wait_until(lambda: waits_for(errno.EROFS), launcher)
        time.sleep(0.5)  # in which the ranks end
        failing.work()
        assert launcher.wait(PATIENCE) == 0, (tmp_path / "message").read_text()
    assert len(folders(RunFolder(tmp_path / "run"))) == 1
    assert read_verdict(attempt).cause == "finished"
    assert [end.kind for end in read_exits(attempt.exits).values()] == ["done", "done"]
    for rank in (0, 1):
        taken = steps(attempt, rank)
        assert taken == list(range(1, len(taken) + 1)), "each line whole and once"
    assert all(map(waits_for, (errno.ESTALE, errno.EIO, errno.EROFS)))
    assert "continuing after" in (tmp_path / "message").read_text()


@pytest.mark.ranks
@needs_seccomp
def test_a_file_system_that_stays_away_ends_the_run_after_the_limit(tmp_path: Path, failing: FailingStorage) -> None:
    attempt = RunFolder(tmp_path / "run").attempt(1)
    command = launch(tmp_path, storage_wait_seconds=1.0)
    with failing.running(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as launcher:
        wait_until(lambda: all(len(steps(attempt, rank)) > 5 for rank in (0, 1)), launcher)
        began = time.monotonic()
        failing.fail(errno.EIO)
        _, message = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1
    assert time.monotonic() - began > 1
    assert re.search(r"StorageError: \[Errno 5\] Input/output error \(for \d+ s\): ", message), message
    assert not [start for start in read_starts(attempt.exits).values() if start.process.is_alive()]


def unreadable(folder: Path) -> None:
    """Make rank 0's heartbeat a file whose reading fails: EIO, from the kernel."""
    (folder / "rank-00000.json").unlink()
    (folder / "rank-00000.json").symlink_to("/proc/self/mem")


def readable(folder: Path, touches: int) -> None:
    (folder / "rank-00000.json").unlink()
    write(folder, 0, touches)


def test_time_in_which_heartbeats_cannot_be_read_is_no_silence(tmp_path: Path) -> None:
    clock = Clock()
    watch = HangWatch(tmp_path, 2, HangLimits(100.0, 500.0), clock=clock)
    for rank in (0, 1):
        write(tmp_path, rank, 1)
    clock.pass_by(watch, 50)
    unreadable(tmp_path)
    assert clock.pass_by(watch, 250) is None
    assert (tmp_path / "dump").read_text() == "", "no rank is asked"
    readable(tmp_path, 1)
    clock.pass_by(watch, 45)
    assert (tmp_path / "dump").read_text() == ""
    clock.pass_by(watch, 10)
    assert (tmp_path / "dump").read_text() == "request-1\n", "50 and 55 seconds of silence"


def test_answers_that_cannot_be_read_are_asked_for_again(tmp_path: Path) -> None:
    clock = Clock()
    watch = HangWatch(tmp_path, 1, HangLimits(100.0, 500.0), clock=clock)
    write(tmp_path, 0, 1)
    clock.pass_by(watch, 103)
    assert (tmp_path / "dump").read_text() == "request-1\n"
    unreadable(tmp_path)
    assert clock.pass_by(watch, 60) is None
    readable(tmp_path, 1)
    assert clock.pass_by(watch, 3) is None
    assert (tmp_path / "dump").read_text() == "request-2\n"


def test_heartbeats_that_stay_unreadable_are_a_hang_at_last(tmp_path: Path) -> None:
    clock = Clock()
    watch = HangWatch(tmp_path, 1, HangLimits(100.0, 500.0), clock=clock)
    write(tmp_path, 0, 1)
    clock.pass_by(watch, 50)
    unreadable(tmp_path)
    assert clock.pass_by(watch, 340) is None
    assert clock.pass_by(watch, 30) is not None


def test_a_request_that_cannot_be_written_is_made_later(tmp_path: Path) -> None:
    clock = Clock()
    watch = HangWatch(tmp_path, 1, HangLimits(100.0, 500.0), clock=clock)
    write(tmp_path, 0, 1)
    (tmp_path / "dump").unlink()
    (tmp_path / "dump").symlink_to("/dev/full")
    assert clock.pass_by(watch, 200) is None
    (tmp_path / "dump").unlink()
    clock.pass_by(watch, 1)
    assert (tmp_path / "dump").read_text().startswith("request-")

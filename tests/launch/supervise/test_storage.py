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
from tests.helpers.failing_storage import FailingStorage, possible
from tests.helpers.waiting import PATIENCE, until

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
    """The command of a launcher with two ranks, which waits no longer than they do."""
    lines = ("name: tiny", "model: {path: none}", "train: {steps: 1}", "resources: {ranks_per_node: 2}")
    (folder / "given.yaml").write_text(
        "\n".join([*lines, f"recovery: {json.dumps({'storage': 'stop', **recovery})}"]) + "\n"
    )
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

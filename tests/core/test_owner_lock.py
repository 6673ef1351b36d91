"""Locks on a file system without flock: real processes whose calls of it return ENOSYS or ENOTSUP."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlhpc.core.owner_lock import is_held, take
from tests.helpers.failing_storage import FailingStorage, possible
from tests.helpers.waiting import until

needs_seccomp = pytest.mark.skipif(not possible(), reason="no seccomp notifications here: these tests DID NOT RUN")

LAUNCHER = """
import sys
from pathlib import Path
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.run_lock import is_locked, locked
folder = RunFolder(Path(sys.argv[1]))
try:
    with locked(folder):
        print("locked", is_locked(folder), flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, is_locked(folder), flush=True)
"""


@pytest.mark.heavy
@needs_seccomp
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_one_launcher_at_a_time_works_in_a_run_folder(number, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    storage = FailingStorage(run, tmp_path)
    storage.fail(number, only=("flock",))
    command = [sys.executable, "-c", LAUNCHER, str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with storage.running(command, **pipes) as first:
        assert first.stdout.readline() == "locked True\n"
        with storage.running(command, **pipes) as second:
            assert second.stdout.readline().startswith("run_dir: another rlhpc is running in ")
        first.send_signal(signal.SIGKILL)
        first.wait()
        with storage.running(command, **pipes) as third:
            assert third.stdout.readline() == "locked True\n"
            third.stdin.close()
            third.wait()
    assert storage.failed["flock"] >= 3
    assert not is_held(run / ".lock"), "released"


def test_of_many_only_one_gets_an_abandoned_lock(tmp_path):
    lock = tmp_path / ".lock"
    abandon(lock, 7, seconds_ago=3600)
    start, found = threading.Barrier(16), []

    def try_it() -> None:
        start.wait()
        found.append(take(lock))

    threads = [threading.Thread(target=try_it) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (mine,) = [one for one in found if one is not None]
    assert is_held(lock)
    assert [path.name for path in tmp_path.iterdir()] == [".lock.owner-8"]
    mine.close()


@pytest.mark.parametrize(("seconds_ago", "free"), [(30, False), (3600, True)])
def test_the_lock_of_another_machine_is_free_once_it_is_not_renewed(seconds_ago, free, tmp_path):
    lock = tmp_path / ".lock"
    abandon(lock, 1, seconds_ago)
    assert is_held(lock) is not free
    taken = take(lock)
    assert (taken is not None) is free


def test_a_released_lock_is_taken_by_who_waits(tmp_path):
    lock = tmp_path / ".lock"
    first = take(lock)
    assert first is not None
    got = []
    waiting = threading.Thread(target=lambda: got.append(take(lock, wait=True)))
    waiting.start()
    first.close()
    until(lambda: bool(got), "the waiting one")
    assert got[0] is not None
    got[0].close()


def abandon(lock: Path, number: int, seconds_ago: float) -> None:
    """The file of an owner on another machine, who renewed it that long ago."""
    file = lock.with_name(f"{lock.name}.owner-{number}")
    file.write_text(json.dumps({"machine": "another", "pid": 1, "start": 1}))
    then = file.stat().st_mtime - seconds_ago
    os.utime(file, (then, then))

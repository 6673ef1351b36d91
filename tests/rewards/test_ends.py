"""A program ends with the worker that runs it, whenever that one is killed, and its folder goes."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlhpc.core import scratch
from rlhpc.rewards import folder
from rlhpc.rewards.folder import private_folder
from tests.helpers.waiting import until
from tests.rewards.users import PYTHON, ROOT, needs_python

pytestmark = [needs_python]
ISOLATIONS = ("namespaces", "filter")

# Runs a program that sleeps. Process number ``link`` (1: guard, 2: first of the namespace, 3: program) waits for the
# test before it asks to end with its parent: as on a machine that is slow at this moment.
_WORKER = """
import mmap, os, sys, time
from rlhpc.rewards import kernel
from rlhpc.rewards.sandbox import Limits, Sandbox
path, isolation, link, seconds, sys._base_executable = sys.argv[1:]
shared = mmap.mmap(os.open(path, os.O_RDWR), 2)
ask = kernel.die_with_parent
def slowly():
    shared[0] += 1
    while shared[0] == int(link) and not shared[1]:
        time.sleep(0.001)
    ask()
kernel.die_with_parent = slowly
Sandbox(Limits(seconds=1000), isolation).run("import time; time.sleep(1000)", within=float(seconds))
"""


@dataclass(frozen=True)
class Worker:
    """A worker with its sandbox, and memory that all of its processes share with the test."""

    process: subprocess.Popen[bytes]
    shared: mmap.mmap
    mark: str

    def left(self) -> list[psutil.Process]:
        """Its processes, but for itself."""
        return [process for process in _marked(self.mark) if process.pid != self.process.pid]

    def programs(self) -> list[psutil.Process]:
        return [p for p in self.left() if (p.info["cmdline"] or [""])[-1].endswith("/solution.py")]


def _marked(mark: str) -> list[psutil.Process]:
    """Processes of a sandbox that have a mark in the one variable that programs are given too."""
    every = psutil.process_iter(["cmdline", "environ"])
    return [p for p in every if (p.info["environ"] or {}).get("LD_LIBRARY_PATH") == mark]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    workers: list[Worker] = []

    def start(isolation: str, *, link: int = 0, within: float = 1000) -> Worker:
        tmp_path.chmod(0o755)
        for above in tmp_path.parents[:2]:  # of pytest, 0700
            above.chmod(0o755)
        path = tmp_path / "shared"
        path.write_bytes(bytes(2))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        arguments = [str(path), isolation, str(link), str(within), PYTHON]
        process = subprocess.Popen([sys.executable, "-c", _WORKER, *arguments], cwd=ROOT)
        with path.open("r+b") as file:
            workers.append(Worker(process, mmap.mmap(file.fileno(), 2), str(tmp_path)))
        return workers[-1]

    yield start
    for started in workers:
        started.shared[1] = 1
        for process in [started.process, *started.left()]:
            process.kill()
        started.process.wait()


@pytest.mark.workers
@pytest.mark.parametrize("link", [1, 2, 3])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_worker_that_is_killed_leaves_no_process(worker, isolation: str, link: int):
    """Killed while one of its processes has not yet asked to end with its parent."""
    started = worker(isolation, link=link)
    until(lambda: started.shared[0] == link, "the process")
    started.process.kill()
    started.process.wait()
    alive = {1: 1, 2: 1, 3: 1 if isolation == "filter" else 0}[link]  # a namespace ends with its first process
    until(lambda: len(started.left()) == alive, "the end of those that wait for nothing")
    started.shared[1] = 1
    until(lambda: not started.left(), "the end of all processes", lambda: str(started.left()))


@pytest.mark.workers
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_program_ends_in_time_though_its_worker_is_stopped(worker, isolation: str):
    started = worker(isolation, within=1)
    until(lambda: started.shared[0] == 3, "the program")
    started.process.send_signal(signal.SIGSTOP)
    until(lambda: not started.left(), "its end", lambda: str(started.left()))


@pytest.mark.workers
def test_a_folder_that_a_killed_worker_left_is_swept(worker, tmp_path, monkeypatch):
    """Not one that is in use, nor one so new that its worker may not have locked it."""
    monkeypatch.setattr(folder.tempfile, "tempdir", str(tmp_path))
    started = worker("filter")
    until(started.programs, "the program")
    started.process.kill()
    started.process.wait()
    until(lambda: not started.left(), "its end")
    (left,) = tmp_path.glob("rlhpc-sandbox-*")
    with private_folder(None) as used:
        folder.sweep()
        assert left.exists()
        monkeypatch.setattr(scratch, "NEW_SECONDS", 0.5)
        time.sleep(0.6)
        folder.sweep()
        assert not left.exists()
        assert os.path.exists(used)
    assert not list(tmp_path.glob("rlhpc-sandbox-*"))


_KILLED = """
import os, random, signal, sys, time
from rlhpc.rewards.sandbox import Limits, Sandbox
isolation, kills, sys._base_executable = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sandbox = Sandbox(Limits(seconds=1000), isolation)
for _ in range(kills):
    worker = os.fork()
    if not worker:
        sandbox.run("import time; time.sleep(1000)")
    time.sleep(random.uniform(0, 0.03))
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
"""


@pytest.mark.long
@pytest.mark.workers
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_hundreds_of_killed_workers_leave_no_process(isolation: str, tmp_path: Path, monkeypatch):
    """At random in the first 30 ms of a run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    subprocess.run([sys.executable, "-c", _KILLED, isolation, "500", PYTHON], cwd=ROOT, check=True)
    until(lambda: not _marked(str(tmp_path)), "the end of all processes", lambda: str(_marked(str(tmp_path))))

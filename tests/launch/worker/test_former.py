"""A rank that is started again ends children of its former process, which hold connections and GPU memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from rlhpc.core.exits import StartRecord
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.process import ProcessId
from rlhpc.core.rank import RankInfo
from rlhpc.launch.worker.main import end_former
from tests.helpers.waiting import until

# A rank's process that leads a group, prints its identity and that of a child, and dies.
DIES = """
import os, subprocess, sys
from rlhpc.core.process import ProcessId
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), ProcessId.own().start, child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    return RunFolder(tmp_path).attempt(1)


@pytest.fixture
def orphan(attempt: AttemptFolder) -> Iterator[ProcessId]:
    """A child that has outlived rank 3's first process on node7."""
    ran = subprocess.Popen([sys.executable, "-c", DIES], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout is not None
    pid, start, child = map(int, ran.stdout.readline().split())
    ran.wait()
    folder = attempt.former_exits(0)
    folder.mkdir(parents=True)
    record = StartRecord(3, "node7", ProcessId(pid, start), 0.0)
    (folder / "rank-00003.start.json").write_text(json.dumps(asdict(record)))
    found = ProcessId.of(child)
    assert found is not None
    yield found
    if found.is_alive():
        os.kill(child, 9)


def rank(number: int = 3, node: str = "node7", generation: int = 1) -> RankInfo:
    return RankInfo(number, 8, 0, node, "node1", 1, generation=generation)


def test_the_child_of_a_dead_rank_is_ended(attempt: AttemptFolder, orphan: ProcessId) -> None:
    end_former(attempt, rank())
    until(lambda: not orphan.is_alive(), "the child's end", seconds=10)


def test_other_ranks_and_starts_leave_it(attempt: AttemptFolder, orphan: ProcessId) -> None:
    for other in (rank(2), rank(node="node8"), rank(generation=0), rank(generation=2)):
        end_former(attempt, other)
    time.sleep(0.3)  # a kill takes a moment
    assert orphan.is_alive()

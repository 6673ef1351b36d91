"""Which nodes watch for the loss of the first one, and with what. tests/slurm/test_lost_engines.py loses it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rlhpc.launch.supervise.batch_job import GUARD, guard_nodes


@pytest.mark.parametrize(
    ("count", "guards"), [(1, []), (2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (5, [1, 3, 4]), (96, [1, 48, 95])]
)
def test_guards_are_apart_from_one_another(count: int, guards: list[int]) -> None:
    nodes = [f"node{number}" for number in range(count)]
    assert guard_nodes(nodes) == [f"node{number}" for number in guards]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_guard_is_good_bash() -> None:
    done = subprocess.run(["shellcheck", "--shell=bash", "-"], input=GUARD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

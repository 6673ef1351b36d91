"""Ranks that share a node between job steps get cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.core import env
from rlhpc.launch.worker.node_check import cores_of, own_share


def topology(folder: Path, sockets: int, cores: int) -> None:
    """Two hardware threads a core, numbered as Linux does: first one of each core, then the others."""
    for cpu in range(2 * sockets * cores):
        socket, core = divmod(cpu % (sockets * cores), cores)
        place = folder / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{socket}\n")
        (place / "core_id").write_text(f"{core}\n")


def test_ranks_have_whole_cores_of_one_socket(tmp_path: Path) -> None:
    topology(tmp_path, sockets=2, cores=4)
    cores = cores_of(range(16), tmp_path)
    assert cores[:2] == [[0, 8], [1, 9]]
    shares = [own_share(cores, rank, 4) for rank in range(4)]
    assert shares == [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]


def test_only_cores_that_the_job_has_are_shared(tmp_path: Path) -> None:
    topology(tmp_path, sockets=1, cores=8)
    cores = cores_of({2, 10, 3, 11, 6, 14}, tmp_path)
    assert [own_share(cores, rank, 2) for rank in range(2)] == [{2, 10}, {3, 11}]
    assert own_share(cores, 0, 4) == set()
    assert cores_of([3, 1], tmp_path / "none") == [[1], [3]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core")
def test_a_rank_is_bound_only_if_the_launcher_asks(tmp_path: Path) -> None:
    program = (
        "import os; from rlhpc.launch.worker.node_check import take_own_cores; "
        "take_own_cores(1, 2); print(len(os.sched_getaffinity(0)))"
    )

    def bound(**variables: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    every = len(os.sched_getaffinity(0))
    assert bound() == every
    assert bound(**{env.RLHPC_OWN_CORES: "1"}) < every

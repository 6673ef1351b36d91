"""Numbers of all ranks in one collective per step: real ranks, joined by gloo."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from rlhpc.core import env
from rlhpc.observe.rank_numbers import RankNumbers, memory_in_use
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda


def _steps_of_a_rank() -> list[dict[str, float]]:
    """Metrics of five steps: the third one has a new name on one rank alone, in the fifth a contributor fails there."""
    import torch.distributed as dist

    from tests.observe.test_rank_numbers import collectives_counted

    rank, numbers, found = int(os.environ[env.RANK]), RankNumbers(), []
    taken = 0

    def own() -> dict[str, float]:
        if taken == 5 and rank == 1:
            raise OSError("gone")
        late = {"late": 7.0} if taken >= 3 and rank == 1 else {}
        return {"a": rank + taken / 10, "b": -1.0 * rank, **late}

    numbers.add("test numbers", own, ("mean", "max", "min", "sum"))
    numbers.add("named ones", lambda: {"watts_max": 9.0 - rank, "idle_min": 1.0 * rank} if rank else {}, None)
    numbers.add("hidden ones", lambda: {"hidden": float(rank)}, ())
    for _ in range(5):
        taken += 1
        with collectives_counted(dist) as calls:
            gathered = numbers.gather()
        found.append({**gathered.metrics(), "calls": len(calls), "hidden": gathered.column("hidden")})
    return found


def collectives_counted(dist: Any) -> Any:
    """Names of the collectives that are called within it."""
    import contextlib

    @contextlib.contextmanager
    def counted() -> Any:
        calls: list[str] = []
        originals = {name: getattr(dist, name) for name in ("all_gather", "all_gather_object")}
        for name, original in originals.items():
            setattr(dist, name, lambda *args, _name=name, _call=original: (calls.append(_name), _call(*args))[1])
        try:
            yield calls
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    return counted()


@pytest.mark.ranks
def test_each_step_gathers_the_numbers_of_all_ranks_in_one_collective() -> None:
    results = run_ranks(_steps_of_a_rank, 3)
    first = results[0]
    assert [step["calls"] for step in first] == [3, 1, 3, 1, 1]  # new names: agreed once
    assert all([step["calls"] for step in result] == [3, 1, 3, 1, 1] for result in results)
    assert first[1]["a_mean"] == pytest.approx(1.2)
    assert (first[1]["a_max"], first[1]["a_max_rank"], first[1]["b_min"], first[1]["b_sum"]) == (2.2, 2, -2, -3)
    assert (first[1]["b_max"], first[1]["b_max_rank"], first[1]["hidden"]) == (0, 0, [0, 1, 2])
    assert (first[1]["watts_max"], first[1]["watts_max_rank"]) == (8, 1)  # though the first rank lacks them
    assert (first[1]["idle_min"], first[1]["idle_min_rank"]) == (1, 1)
    assert "hidden_mean" not in first[1]
    assert "late_max" not in first[1]
    # A name that the first rank lacks has no reduction there, but it is gathered.
    assert (results[1][3]["late_max"], results[1][3]["late_max_rank"], results[1][3]["late_sum"]) == (7, 1, 7)
    assert first[4]["a_sum"] == pytest.approx(0.5 + 2.5)  # without the rank that failed


_GROWS = """
import json, mmap
from rlhpc.observe.rank_numbers import memory_in_use
size = 512 * 2**20
held = mmap.mmap(-1, size)
before = memory_in_use()
for page in range(0, size, mmap.PAGESIZE):
    held[page] = 1
print(json.dumps([before, memory_in_use()]))
"""


@pytest.mark.heavy
def test_memory_of_the_process_is_what_the_kernel_counts() -> None:
    """In a process of its own: in this one, other threads allocate and free meanwhile."""
    grows = subprocess.run([sys.executable, "-c", _GROWS], capture_output=True, text=True, check=True)
    before, after = json.loads(grows.stdout)
    assert after["memory/cpu_gib"] - before["memory/cpu_gib"] == pytest.approx(0.5, rel=0.1)
    assert after["memory/cpu_peak_gib"] >= after["memory/cpu_gib"] * 0.99
    assert not any("device" in name for name in after)


def test_memory_of_a_gpu_is_the_device_s_and_the_allocator_s() -> None:
    with FakeCuda():
        found = memory_in_use()
    names = {name for name in found if "device" in name}
    assert names == {
        "memory/device_gib",
        "memory/device_share",
        "memory/device_allocated_gib",
        "memory/device_peak_allocated_gib",
        "memory/device_peak_reserved_gib",
    }
    assert all(math.isfinite(found[name]) for name in names)

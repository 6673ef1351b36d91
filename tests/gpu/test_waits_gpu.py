"""Waits in collectives on NCCL, by events of the caller's stream."""

from __future__ import annotations

import pytest
import torch

from rlhpc.core import spans
from tests.helpers.distributed import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def test_a_synchronous_collective_is_measured_by_the_device() -> None:
    """One rank, whose collectives are copies of 1 GiB: they take device time, and less than the phase."""
    ((wait, phase, idle),) = run_ranks(_on_nccl, 1, join=False)
    assert 0.005 < wait < 0.9 * phase
    assert idle < 0.1 * wait, "a phase that only computes"


def _on_nccl() -> tuple[float, float, float]:
    """Seconds that a phase with collectives waits and takes, and that one without waits."""
    import torch.distributed as dist

    from rlhpc.observe.metrics import Stopwatch
    from rlhpc.parallel.waits import measure_waits

    measure_waits()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor, output = (torch.ones(2**28, device="cuda") for _ in range(2))
    matrix = torch.ones(8192, 8192, device="cuda")
    dist.all_gather([output], tensor)  # makes the communicator
    spans.take()
    clock = Stopwatch()
    with clock("update"):
        for _ in range(20):
            dist.all_gather([output], tensor)
            matrix @ matrix
    with clock("prepare"):
        for _ in range(20):
            matrix @ matrix
    update, prepare = spans.take().spans
    dist.destroy_process_group()
    return update.wait, update.end - update.begin, prepare.wait

"""Staged weight syncs as on a GPU: weights on devices, staging memory pinned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhpc.reshard.staged.source import WeightSource
from rlhpc.reshard.staged.target import WeightTarget
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda
from tests.reshard.staged.ends import Actor, Case, Engine, job_of

pytestmark = pytest.mark.ranks


def sync(case: Case) -> tuple[list[str], list[tuple[str, ...]]]:
    """Wrong weights after a sync from device to device, and calls to the device."""
    with job_of(case) as job, FakeCuda() as cuda:
        job = replace(job, device=torch.device("cuda", 0))
        trains = job.rank < case.trainers
        end = Actor(case, job.rank) if trains else Engine(case, job.rank)
        tensors = end.parameters.tensors
        if isinstance(end, Actor):
            end.train(0)
        end.parameters.tensors = {name: tensor.to(job.device) for name, tensor in tensors.items()}
        if isinstance(end, Actor):
            source = WeightSource(end, case.sides, case.section, job)
            source.publish(0)
            source.close()
            return [], cuda.calls
        target = WeightTarget(case.sides, case.section, job)
        target.write(end, 0)
        target.close()
        end.parameters.tensors = {name: tensor.cpu() for name, tensor in end.parameters.tensors.items()}
        return end.wrong(0), cuda.calls


def test_weights_go_from_device_to_device_through_pinned_memory() -> None:
    (_, sent), (wrong, received) = run_ranks(sync, 2, Case("dsv3", 1, 1, dtype=torch.bfloat16), join=False, timeout=60)
    assert wrong == []
    assert [call[0] for call in sent].count("cudaHostRegister") == 1
    assert [call[0] for call in received].count("cudaHostRegister") == 2  # two versions
    assert "synchronize" in [call[0] for call in received]

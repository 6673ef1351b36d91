"""Joining the ranks: the default group and Megatron's groups for one layout, each initialised here only."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from rlhpc.core import env
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.compat import megatron_device
from rlhpc.plan.layout import ParallelLayout


def join(info: RankInfo, timeout_minutes: float = 30) -> None:
    """Enter the job's default process group: NCCL with a GPU, gloo without."""
    os.environ.setdefault(env.MASTER_ADDR, info.master_addr)
    os.environ.setdefault(env.MASTER_PORT, str(info.master_port or 29500))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
    elif info.world_size == 1 and not info.master_port:
        # Alone there is nobody to meet, and no port to be taken by somebody else.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        rank=info.rank,
        world_size=info.world_size,
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )


def build_groups(layout: ParallelLayout, seed: int) -> None:
    """Megatron's process groups and its random-number tracker, once in a process."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with megatron_device():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            order="tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(seed)


def leave() -> None:
    """Leave every group. Called at a normal end only: after an error the others may not answer."""
    if dist.is_initialized():
        dist.destroy_process_group()

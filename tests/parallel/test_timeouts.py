"""Every group of a process has one timeout, which the hang watch of a run precedes."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from rlhpc.parallel import store
from tests.helpers.distributed import run_ranks
from tests.parallel.group_timeouts import seconds_by_group

MINUTES = 95.0


def test_a_hang_is_found_before_any_group_ends():
    assert store.group_timeout() == datetime.timedelta(minutes=30), "torch's own without a hang watch"
    for limits in ((20.0, 1800.0), (7200.0, 1800.0), (1800.0, 1e6)):
        assert store.beyond(*limits) >= max(limits) + 12 * 3600, "a long rollout may take hours of progress"


def make_groups() -> tuple[dict[str, float], dict[str, float]]:
    """The timeouts of all kinds of groups that a run makes; of a mesh, a pair and the store."""
    import torch
    import torch.distributed as dist

    from rlhpc.backends.fsdp.sharded_model import make_meshes
    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import build_groups, engine_group, job_store, join
    from rlhpc.parallel.pairs import open_pair
    from rlhpc.sharding.layout import ParallelLayout
    from rlhpc.sharding.mesh_sizes import MeshSizes

    info = RankInfo.from_environ()
    join(info, timeout_minutes=MINUTES)
    build_groups(ParallelLayout(world_size=2, tp=2), seed=1)
    meshes = make_meshes(MeshSizes(dp_replicate=1, dp_shard=2, cp=1), "cpu")
    engine_group(2, info.rank, 2)
    dist.new_group(backend="gloo")  # as vLLM and checkpoints do
    pair: Any = open_pair(job_store(), "pair", (0, 1), info.rank)
    dist.barrier()
    back_ends = {"mesh": meshes.copy_group._get_backend(torch.device("cpu")), "pair": pair._group}
    others = {name: back_end.options._timeout.total_seconds() for name, back_end in back_ends.items()}
    return seconds_by_group(), {**others, "store": job_store().timeout.total_seconds()}


@pytest.mark.ranks
def test_each_group_of_either_back_end_has_the_timeout_of_the_job():
    for groups, others in run_ranks(make_groups, 2, join=False):
        assert len(groups) > 15, groups
        assert {"TENSOR_MODEL_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP", "default_pg"} <= {*groups}
        assert {*groups.values(), *others.values()} == {60 * MINUTES}, (groups, others)

"""Real Megatron and vLLM on ranks of their own: the engine is the one that would have read the weights from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhpc.config.schema import ReshardSection
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.groups import job_store
from rlhpc.reshard.sides import sync_sides
from rlhpc.reshard.staged.job import StagedJob
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.reshard.staged.target import WeightTarget
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers import equality, weight_syncs
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case
from tests.rollout import engines
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]
SECTION = ReshardSection(verify="always", bucket_mib=1)


def sync(models: Path, case: Case, trainers: int, tp: int) -> bool:
    """Two versions, ``a`` and ``b``, from Megatron on the first ranks to an engine on the others."""
    info, ranks = RankInfo.from_environ(), range(trainers + tp)
    folders, engine = [models / case.kind / letter for letter in "ab"], EngineLayout(tp)
    job = StagedJob(info.job_rank, 2, torch.float32, torch.device("cpu"), job_store())
    same = True
    if info.role == "trainers":
        actor = equality.actor(folders[0], case)
        sides = sync_sides(actor.weights.shape, actor.layout, engine, ranks[:trainers], ranks[trainers:])
        source = WeightSource(actor, sides, SECTION, job)
        source.publish(0)
        actor.load_pretrained(folders[1])
        source.publish(1)
        source.close()
    else:
        from rlhpc.models import read_model
        from rlhpc.sharding.layout import ParallelLayout

        stock = [engines.stock_greedy(folder, tp) for folder in folders]
        vllm, shape = engines.build(folders[0], tp), read_model(folders[0])
        layout = ParallelLayout(trainers, tp=case.tp, pp=case.pp, ep=case.ep)
        target = WeightTarget(sync_sides(shape, layout, engine, ranks[:trainers], ranks[trainers:]), SECTION, job)
        for version, expected in enumerate(stock):
            vllm.wake_weights()
            target.write(vllm, version)
            vllm.wake_cache()
            same &= engines.greedy(vllm) == expected
        target.close()
    return same


CASES = [
    pytest.param(Case("qwen2_tied", tp=2), 2, 1, id="tied-2+1"),
    pytest.param(Case("qwen3moe", tp=2, ep=2), 2, 2, id="experts-2+2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("case", "trainers", "tp"), CASES)
def test_the_engine_is_the_one_that_read_the_weights_from_disk(
    case: Case, trainers: int, tp: int, tmp_path: Path
) -> None:
    models = weight_syncs.make_models(tmp_path, [case.kind])
    found = run_ranks(sync, trainers + tp, models, case, trainers, tp, roles=(trainers, tp), timeout=280)
    assert found == [True] * (trainers + tp)

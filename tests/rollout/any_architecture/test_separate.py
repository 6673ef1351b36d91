"""A model without a table is trained on ranks of its own, and its weights are sent to an engine on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.config.schema import ReshardSection
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.groups import job_store
from rlhpc.reshard.discovered import discover_sides
from rlhpc.reshard.staged.job import StagedJob, StoreExchange
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.reshard.staged.target import WeightTarget
from tests.helpers.distributed import run_ranks
from tests.rollout.any_architecture import serving
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]
SECTION = ReshardSection(verify="always", bucket_mib=1)


def sync(folder: Path, trainers: int, tp: int) -> Any:
    """Two versions from ranks that train to an engine's: the trainers' bytes sent, the engine's distances."""
    info, ranks = RankInfo.from_environ(), range(trainers + tp)
    trains = info.role == "trainers"
    job = StagedJob(info.job_rank, 2, torch.float32, torch.device("cpu"), job_store())
    exchange, found = StoreExchange(job, ranks), []
    if trains:
        actor = serving.make_backend(folder / "0")
        source = WeightSource(actor, discover_sides(actor, None, exchange), SECTION, job)
        for version in range(2):
            actor.load_pretrained(folder / str(version))
            source.publish(version)
        source.close()
    else:
        engine = serving.build_engine(folder / "0", tp)
        target = WeightTarget(discover_sides(None, engine, exchange), SECTION, job)
        for version in range(2):
            engine.wake_weights()
            target.write(engine, version)
            engine.wake_cache()
            model = serving.plain_model(folder / str(version))
            found.append(serving.distance(model, serving.answers(engine)))
        target.close()
    return found


CASES = [pytest.param(1, 1, id="1+1"), pytest.param(2, 2, id="2+2", marks=pytest.mark.long)]


@pytest.mark.parametrize(("trainers", "tp"), CASES)
def test_an_engine_on_ranks_of_its_own_has_the_trainers_weights(trainers: int, tp: int, tmp_path: Path) -> None:
    for seed in range(2):
        serving.make(tmp_path / str(seed), "gpt_oss", seed)
    found = run_ranks(sync, trainers + tp, tmp_path, trainers, tp, roles=(trainers, tp), timeout=280)
    for distances in found[trainers:]:
        assert len(distances) == 2
        assert max(distances) < 1e-5

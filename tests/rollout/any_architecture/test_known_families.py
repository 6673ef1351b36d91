"""What an engine discovers of a known family is what the family's table says, which it does not use here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from rlhpc.models import read_model
from rlhpc.sharding.engine_shards import EngineLayout, engine_shards
from rlhpc.sharding.shards import Shard
from rlhpc.sharding.trainer_shards import without_stacks
from tests.helpers.distributed import run_ranks
from tests.rollout.any_architecture import serving
from tests.rollout.engines import FAMILIES, cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long, cpu_only]
EXPERTS = ("mixtral", "qwen3moe", "dsv3")


def differences(models: Path, tp: int) -> dict[str, list[Shard]]:
    """Shards of this rank that only one of both has."""
    found = {}
    for kind in FAMILIES:
        for by_experts in (False, True) if kind in EXPERTS and tp > 1 else (False,):
            layout = EngineLayout(tp, by_experts)
            table = [
                [
                    one
                    for shard in engine_shards(read_model(models / kind), layout, rank)
                    for one in without_stacks(shard)
                ]
                for rank in range(tp)
            ]
            tensors = list(dict.fromkeys(shard.tensor for shards in table for shard in shards))
            engine = serving.build_engine(models / kind, tp, expert_parallel=by_experts)
            found[f"{kind} {by_experts}"] = sorted(
                set(table[dist.get_rank()]) ^ set(engine.discover_shards(tensors)), key=str
            )
            engine.shutdown()
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_discovered_shards_are_those_of_the_table(tp: int, tmp_path: Path) -> None:
    for kind in FAMILIES:
        serving.make(tmp_path / kind, kind)
    for rank in run_ranks(differences, tp, tmp_path, tp):
        assert not any(rank.values())
        assert len(rank) == (7 if tp == 1 else 10)

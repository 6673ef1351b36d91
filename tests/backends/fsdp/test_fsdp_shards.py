"""Shards that a plan computes from a known family's table are those of the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.models import read_model
from rlhpc.sharding.mesh_sizes import MeshSizes
from rlhpc.sharding.shards import Shard
from rlhpc.sharding.trainer_shards import fsdp_shards, without_stacks
from tests.helpers.tiny_models import KINDS, make_model

pytestmark = pytest.mark.heavy  # imports transformers


def _of_model(folder: Path, sizes: MeshSizes, rank: int) -> list[Shard]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhpc.backends.fsdp.sharded_model import persistent_buffers
    from rlhpc.backends.fsdp.stored import ModelWeight, rank_shards, stored_weights

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = {name: ModelWeight(tuple(p.shape), sharded=True) for name, p in model.named_parameters()}
    for name, buffer in persistent_buffers(model).items():
        weights[name] = ModelWeight(tuple(buffer.shape), sharded=False, float32=True)
    return rank_shards(stored_weights(model, weights), sizes, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_has_the_shards_of_the_model(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, kind)
    shape, sizes = read_model(folder), MeshSizes(dp_replicate=2, dp_shard=3, cp=2)
    for rank in (0, 4, 5, 11):
        planned = [one for shard in fsdp_shards(shape, sizes, rank) for one in without_stacks(shard)]
        assert sorted(planned, key=str) == sorted(_of_model(folder, sizes, rank), key=str)

"""Which block of a parameter each stored tensor is, against transformers' own conversion of real tensors."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.sharding.mesh_sizes import MeshSizes, held_rows
from rlhpc.sharding.shards import Shard
from rlhpc.sharding.trainer_shards import fsdp_shards, without_stacks
from tests.helpers.tiny_models import KINDS, make_model

pytestmark = pytest.mark.heavy  # imports transformers

EXPERTS = {"mlp.experts.gate_up_proj": (5, 6, 4), "mlp.experts.down_proj": (5, 4, 3)}
JOINED = {"attn.query.weight": (6, 4), "attn.key.weight": (6, 4), "attn.value.weight": (6, 4), "norm.weight": (7,)}


@pytest.fixture(params=["experts", "joined"])
def model(request: pytest.FixtureRequest) -> Any:
    """A module with parameters of two layers, and how transformers converts a file's tensors into them."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter

    stacked = [
        WeightConverter(
            ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            "mlp.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(dim=0)]),
    ]
    projections = ["attn.query.weight", "attn.key.weight", "attn.value.weight"]
    split = [WeightConverter("attn.qkv.weight", projections, [Chunk(dim=0)])]
    shapes, conversions = (EXPERTS, stacked) if request.param == "experts" else (JOINED, split)
    return _module(
        {f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}, conversions
    )


def _module(shapes: dict[str, tuple[int, ...]], conversions: list[Any]) -> Any:
    root = nn.Module()
    for number, (name, shape) in enumerate(shapes.items()):
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        values = torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)
        owner.register_parameter(leaf, nn.Parameter(values + 1000 * number))
    root.config, root._weight_conversions = None, conversions
    return root


def _stored(model: Any) -> list[Any]:
    from rlhpc.backends.fsdp.stored import ModelWeight, stored_weights

    return stored_weights(model, {name: ModelWeight(tuple(p.shape), True) for name, p in model.named_parameters()})


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_shards_contain_what_transformers_would_save(model: Any, shards: int) -> None:
    """Each rank's part of a parameter is PyTorch's chunk of it; its shards, put together, are the stored tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    from rlhpc.backends.fsdp.stored import rank_shards, shards_holding

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    expected = revert_weight_conversion(model, parameters)
    found = {name: torch.full_like(tensor, -1.0) for name, tensor in expected.items()}
    weights, sizes = _stored(model), MeshSizes(dp_shard=shards)
    for rank in range(shards):
        parts = {name: _chunk(p, shards, rank) for name, p in parameters.items()}
        for shard in rank_shards(weights, sizes, rank):
            target = found[shard.tensor.name][shard.box.slices]
            assert (target == -1).all(), "held twice"
            target.copy_(parts[shard.local_name][shard.local_box.slices].view(shard.box.shape))
    assert {weight.tensor.name: weight.tensor.shape for weight in weights} == {n: t.shape for n, t in expected.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for weight in weights:
        holding = [rank for rank in range(shards) if rank_shards([weight], sizes, rank)]
        assert shards_holding(weight, sizes) == holding


def _chunk(parameter: Any, shards: int, rank: int) -> Any:
    chunks = parameter.chunk(shards)
    return chunks[rank] if rank < len(chunks) else parameter[:0]


def test_rows_are_those_of_torch_chunks() -> None:
    for rows, shards in product(range(1, 20), range(1, 9)):
        for index in range(shards):
            assert list(held_rows(rows, shards, index)) == _chunk(torch.arange(rows), shards, index).tolist()


def test_layers_and_experts_are_numbered(model: Any) -> None:
    for weight in _stored(model):
        parts = weight.tensor.name.split(".")
        assert weight.tensor.layer == int(parts[1])
        assert weight.tensor.expert == (int(parts[4]) if "experts" in parts else None)


@pytest.mark.parametrize("operation", ["Transpose", "Interleave"])
def test_a_conversion_that_does_more_is_refused(operation: str) -> None:
    from transformers import core_model_loading as loading

    conversion = loading.WeightConverter("a.weight", "b.weight", [getattr(loading, operation)()])
    with pytest.raises(UserError, match=r"^model\.path: weights of Module are converted from its files by"):
        _stored(_module({"b.weight": (4, 4)}, [conversion]))


def test_sizes_of_a_mesh() -> None:
    sizes = MeshSizes(dp_replicate=2, dp_shard=3, cp=2)
    assert [sizes.shard_index(rank) for rank in range(12)] == [*range(6), *range(6)]
    sizes.check(12)
    for wrong, ranks in ((sizes, 6), (MeshSizes(dp_shard=-1, cp=-1), 1), (MeshSizes(dp_shard=0), 0)):
        with pytest.raises(UserError, match=r"^actor\.parallel: dp_replicate .* ranks, but there are"):
            wrong.check(ranks)


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

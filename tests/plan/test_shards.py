"""The shards of the training side: every element of every tensor, in the right place, in any layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, shape_of
from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.shards import check_divides, megatron_shards, model_tensors, padded_vocab

BASE = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def _shape(**changes: object) -> ModelShape:
    return shape_of({**BASE, **changes})


SHAPES = {
    "qwen2": _shape(),
    "qwen2_tied": _shape(tie_word_embeddings=True),
    "qwen3": _shape(architectures=["Qwen3ForCausalLM"], head_dim=4),
    "llama": _shape(architectures=["LlamaForCausalLM"]),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_each_element_is_held_once_by_every_model_replica(kind: str) -> None:
    shape = SHAPES[kind]
    for tp, pp, vpp, dp in itertools.product((1, 2, 4), (1, 2), (None, 2), (1, 2)):
        layout = ParallelLayout(tp * pp * dp, tp=tp, pp=pp, vpp=vpp)
        for group in layout.groups("tp", "pp"):
            counts = {tensor.name: np.zeros(tensor.shape, int) for tensor in model_tensors(shape)}
            for rank in group:
                for shard in megatron_shards(shape, layout, rank):
                    if shard.local_name == "output_layer.weight" and shape.tied_embeddings:
                        continue  # Megatron's second copy of tied embeddings
                    counts[shard.tensor.name][shard.box.slices] += 1
            for name, count in counts.items():
                whole = name.endswith(("norm.weight",))
                assert (count == (tp if whole else 1)).all(), (layout, name)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_local_parameters_are_filled_without_overlap(tp: int) -> None:
    """Each rank's fused parameter is covered exactly, vocabulary padding aside."""
    shape = SHAPES["qwen2"]
    layout = ParallelLayout(tp, tp=tp)
    local_shapes = {
        "embedding.word_embeddings.weight": (padded_vocab(37, tp) // tp, 16),
        "decoder.layers.0.self_attention.linear_qkv.weight": ((8 + 2 + 2) * 2 // tp, 16),
        "decoder.layers.0.self_attention.linear_qkv.bias": ((8 + 2 + 2) * 2 // tp,),
        "decoder.layers.0.self_attention.linear_proj.weight": (16, 16 // tp),
        "decoder.layers.0.mlp.linear_fc1.weight": (48 // tp, 16),
        "decoder.layers.0.mlp.linear_fc2.weight": (16, 24 // tp),
    }
    for rank in range(tp):
        filled = {name: np.zeros(size, int) for name, size in local_shapes.items()}
        for shard in megatron_shards(shape, layout, rank):
            if shard.local_name in filled:
                filled[shard.local_name][shard.local_box.slices] += 1
        for name, count in filled.items():
            if name.startswith("embedding"):
                rows = max(0, min(37 - rank * len(count), len(count)))
                assert (count[:rows] == 1).all()
                assert (count[rows:] == 0).all()
            else:
                assert (count == 1).all(), (rank, name)


def test_fused_qkv_is_ordered_by_query_group() -> None:
    """Megatron's rows: the queries of group 0, its key, its value, then group 1."""
    shape = SHAPES["qwen2"]  # 4 queries a group, heads of 2 rows
    rows = {}
    for shard in megatron_shards(shape, ParallelLayout(1), 0):
        if shard.local_name == "decoder.layers.0.self_attention.linear_qkv.weight":
            name = shard.tensor.name.split(".")[-2]
            for i in range(shard.box.shape[0]):
                rows[shard.local_start[0] + i] = (name, shard.box.start[0] + i)
    expected = []
    for group in range(2):
        expected += [("q_proj", group * 8 + i) for i in range(8)]
        expected += [("k_proj", group * 2 + i) for i in range(2)]
        expected += [("v_proj", group * 2 + i) for i in range(2)]
    assert [rows[i] for i in range(len(rows))] == expected


def test_layers_are_dealt_to_stages_and_virtual_stages_in_order() -> None:
    shape = _shape(num_hidden_layers=8)
    layout = ParallelLayout(2, pp=2, vpp=2)
    held = {
        rank: {(s.chunk, s.tensor.layer) for s in megatron_shards(shape, layout, rank) if s.tensor.layer is not None}
        for rank in range(2)
    }
    assert held[0] == {(0, 0), (0, 1), (1, 4), (1, 5)}
    assert held[1] == {(0, 2), (0, 3), (1, 6), (1, 7)}


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, "3 does not divide the model's 8 attention heads; use one of"),
        ({"intermediate_size": 30}, 4, "4 does not divide the model's 30 feed-forward size"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 24}, 2, "key-value heads do not divide"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_divide_the_model_are_refused(
    changes: dict[str, object], tp: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_divides(_shape(**changes), tp, "parallel.tp")

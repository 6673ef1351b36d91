"""The shards of the training side: every element of every tensor, in the right place, in any layout."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress

import numpy as np
import pytest

from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, shape_of
from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.shards import Box, megatron_shards, model_tensors, padded_vocab
from tests.helpers.published import DEEPSEEK_V3_BF16

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


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK = {
    **EXPERTS,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
SHAPES = {
    "qwen2": _shape(),
    "qwen2_tied": _shape(tie_word_embeddings=True),
    "qwen3": _shape(architectures=["Qwen3ForCausalLM"], head_dim=4),
    "llama": _shape(architectures=["LlamaForCausalLM"]),
    "mixtral": _shape(architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _shape(architectures=["Qwen3MoeForCausalLM"], num_experts=8, mlp_only_layers=[2], **EXPERTS),
    "deepseek_v3": _shape(**DEEPSEEK),
    "deepseek_v3_direct": _shape(**{**DEEPSEEK, "q_lora_rank": None, "num_hidden_layers": 6}),
}
STAGES: list[dict[str, int]] = [
    {},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "first_stage_layers": 1},
    {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    {"pp": 2, "vpp": 2, "last_stage_layers": 2},
]


def _layouts(shape: ModelShape) -> list[ParallelLayout]:
    """Small layouts along every axis and several at once, those of experts where the model has some."""
    layouts = []
    for stages, tp, cp in itertools.product(STAGES, (1, 2, 4), (1, 2)):
        pp = stages.get("pp", 1)
        for ep, etp, dp in ((1, 1, 1), (1, 1, 2), (2, 1, 2), (4, 1, 2), (1, 2, 1), (2, 2, 2), (2, 4, 2)):
            ranks, is_dense = tp * cp * dp, shape.experts is None
            if ranks * pp > 16 or ranks % (ep * etp) or (is_dense and ep * etp > 1):
                continue
            layout = ParallelLayout(ranks * pp, tp=tp, cp=cp, ep=ep, etp=etp, **stages)
            with suppress(UserError):
                layout.stage_layers(shape.num_layers)
                layouts.append(layout)
    return layouts


@pytest.mark.parametrize("kind", SHAPES)
def test_each_element_is_held_once_by_every_model_replica(kind: str) -> None:
    """On the ranks that differ along tp and pp, and of experts on those that differ along etp, ep and pp."""
    shape = SHAPES[kind]
    tensors = model_tensors(shape)
    layouts = _layouts(shape)
    assert len(layouts) > 20
    for layout in layouts:
        held = [megatron_shards(shape, layout, rank) for rank in range(layout.world_size)]
        for axes, of_expert in ((("tp", "pp"), False), (("etp", "ep", "pp"), True)):
            chosen = [tensor for tensor in tensors if (tensor.expert is not None) == of_expert]
            for group in layout.groups(*axes) if chosen else ():
                counts = {tensor.name: np.zeros(tensor.shape, np.int8) for tensor in chosen}
                for shard in (shard for rank in group for shard in held[rank]):
                    is_second_copy = shard.local_name == "output_layer.weight" and shape.tied_embeddings
                    if (shard.tensor.expert is not None) == of_expert and not is_second_copy:
                        counts[shard.tensor.name][shard.box.slices] += 1
                for name, count in counts.items():
                    assert (count == (layout.tp if _is_whole(name) else 1)).all(), (layout, name)


def _is_whole(name: str) -> bool:
    """Replicated over tp: norms, the router, and latent attention's way down."""
    return name.endswith(
        ("norm.weight", "gate.weight", "e_score_correction_bias", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_no_element_of_a_local_parameter_is_held_twice_or_left_out(kind: str) -> None:
    """Boxes fill each parameter from its first element to its last; only the vocabulary's padding lies beyond."""
    shape = SHAPES[kind]
    for layout in _layouts(shape)[::3]:
        for rank in range(layout.world_size):
            boxes: dict[tuple[int, str], list[Box]] = {}
            for shard in megatron_shards(shape, layout, rank):
                boxes.setdefault((shard.chunk, shard.local_name), []).append(shard.local_box)
            for (_, name), held in boxes.items():
                filled = np.zeros([max(stops) for stops in zip(*(box.stop for box in held), strict=True)], np.int8)
                for box in held:
                    filled[box.slices] += 1
                assert (filled == 1).all(), (layout, rank, name)
                if name.endswith("experts.w13"):
                    assert shape.experts is not None
                    each = (shape.experts.num_experts // layout.ep, 2 * shape.experts.ffn_size // layout.etp, 16)
                    assert filled.shape == each, layout


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


def test_experts_are_dealt_to_ranks_in_blocks_gate_before_up() -> None:
    """Of 8 experts with 8 rows each, at ep 4 and etp 2: two on a rank, four rows of gate, then four of up."""
    shape, layout = SHAPES["deepseek_v3"], ParallelLayout(8, tp=2, ep=4, etp=2)
    for rank in range(8):
        first, row = 2 * (rank // 2), 4 * (rank % 2)
        found = {
            (shard.tensor.name.split("experts.")[1], shard.box.start, shard.local_start, shard.local_box.shape)
            for shard in megatron_shards(shape, layout, rank)
            if shard.tensor.expert is not None and shard.tensor.layer == 3
        }
        assert found == {
            held
            for local in range(2)
            for held in (
                (f"{first + local}.gate_proj.weight", (row, 0), (local, 0, 0), (1, 4, 16)),
                (f"{first + local}.up_proj.weight", (row, 0), (local, 4, 0), (1, 4, 16)),
                (f"{first + local}.down_proj.weight", (0, row), (local, 0, 0), (1, 16, 4)),
            )
        }


def test_the_shards_of_one_rank_of_a_large_job_are_planned_at_once() -> None:
    shape = shape_of(DEEPSEEK_V3_BF16)
    layout = ParallelLayout(2048, tp=8, pp=16, ep=64, last_stage_layers=1)
    start = time.process_time()
    shards = megatron_shards(shape, layout, 100)
    assert time.process_time() - start < 1
    assert {shard.tensor.layer for shard in shards} == {None, 0, 1, 2, 3}  # 4 layers a stage, and the embedding


def test_layers_are_dealt_to_stages_and_virtual_stages_in_order() -> None:
    shape = _shape(num_hidden_layers=8)
    layout = ParallelLayout(2, pp=2, vpp=2)
    held = {
        rank: {(s.chunk, s.tensor.layer) for s in megatron_shards(shape, layout, rank) if s.tensor.layer is not None}
        for rank in range(2)
    }
    assert held[0] == {(0, 0), (0, 1), (1, 4), (1, 5)}
    assert held[1] == {(0, 2), (0, 3), (1, 6), (1, 7)}

"""The boxes of an engine's ranks: all of the model, each in its place in vLLM's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from rlhpc.models import ModelShape, shape_of
from rlhpc.sharding.engine_shards import EngineLayout, engine_parameters, engine_shards
from rlhpc.sharding.shards import Shard, tensor_places
from tests.helpers.movement import SHAPES
from tests.helpers.published import DEEPSEEK_V3_BF16, QWEN3_235B_A22B

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def layouts_of(shape: ModelShape) -> Iterator[EngineLayout]:
    for tp in (1, 2, 4, 8):
        yield EngineLayout(tp)
        if shape.experts and shape.experts.num_experts % tp == 0:
            yield EngineLayout(tp, expert_parallel=True)


CASES = [
    pytest.param(shape, layout, id=f"{kind}-{layout.tp}{'-by-experts' * layout.expert_parallel}")
    for kind, shape in SHAPES.items()
    for layout in layouts_of(shape)
]


def shards_of(shape: ModelShape, layout: EngineLayout, name: str) -> list[list[Shard]]:
    """For each rank its shards of the tensors whose name ends so."""
    return [
        [shard for shard in engine_shards(shape, layout, rank) if shard.tensor.name.endswith(name)]
        for rank in range(layout.tp)
    ]


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_the_ranks_together_have_every_element(shape: ModelShape, layout: EngineLayout) -> None:
    """Of a tensor that is cut each element is on one rank, or on as many as share its key-value head."""
    counts = {place.tensor: np.zeros(place.tensor.shape, np.int8) for place in tensor_places(shape, stacked=True)}
    for rank in range(layout.tp):
        for shard in engine_shards(shape, layout, rank):
            counts[shard.tensor][shard.box.slices] += 1
    whole = ("norm.weight", "gate.weight", "e_score_correction_bias", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    heads = 1 if shape.latent else max(1, layout.tp // shape.num_kv_heads)
    for tensor, count in counts.items():
        shared = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
        expected = layout.tp if tensor.name.endswith(whole) else heads if tensor.name.endswith(shared) else 1
        assert (count == expected).all(), tensor.name


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_parameters_are_filled_from_end_to_end_and_no_element_twice(shape: ModelShape, layout: EngineLayout) -> None:
    """On every rank the parameters are those predicted. Rows that pad the vocabulary are left alone."""
    sizes = engine_parameters(shape, layout)
    for rank in range(layout.tp):
        filled = {name: np.zeros(size, np.int8) for name, size in sizes.items()}
        rows: dict[str, int] = defaultdict(int)
        for shard in engine_shards(shape, layout, rank):
            place = filled[shard.local_name][shard.local_box.slices]
            assert place.shape == shard.local_box.shape, f"{shard.local_name} is too small"
            place += 1
            rows[shard.local_name] += shard.box.shape[0]
        for name, count in filled.items():
            of_words = count[: rows[name]] if name in VOCABULARY else count
            assert (of_words == 1).all(), (rank, name)
            assert count.sum() == of_words.size, (rank, name)


def test_key_value_heads_are_repeated_where_there_are_more_ranks() -> None:
    """2 heads of 2 rows on 8 ranks: four ranks have the first, four the second, after their one query head."""
    held = shards_of(SHAPES["qwen2"], EngineLayout(8), "layers.1.self_attn.k_proj.weight")
    assert [(shard.box.start[0], shard.box.stop[0], shard.local_start) for (shard,) in held] == [
        (head, head + 2, (2, 0)) for head in (0, 0, 0, 0, 2, 2, 2, 2)
    ]


def test_queries_keys_and_values_follow_each_other() -> None:
    """vLLM's order, not Megatron's by groups: on rank 1 of 2 four query heads of 2 rows, a key, a value."""
    shards = {
        shard.tensor.name.split(".")[-2]: (shard.box.start[0], shard.box.stop[0], shard.local_start[0])
        for shard in engine_shards(SHAPES["qwen2"], EngineLayout(2), 1)
        if shard.local_name == "model.layers.0.self_attn.qkv_proj.weight"
    }
    assert shards == {"q_proj": (8, 16, 0), "k_proj": (2, 4, 8), "v_proj": (2, 4, 10)}


def test_the_vocabulary_is_padded_to_a_multiple_of_64_before_it_is_cut() -> None:
    """37 words on 4 ranks: 16 rows each, of which the third has 5 words and the last none."""
    shape, layout = SHAPES["qwen2"], EngineLayout(4)
    held = shards_of(shape, layout, "lm_head.weight")
    assert [[(shard.box.start[0], shard.box.stop[0]) for shard in shards] for shards in held] == [
        [(0, 16)],
        [(16, 32)],
        [(32, 37)],
        [],
    ]
    assert engine_parameters(shape, layout)["lm_head.weight"] == (16, 8)
    assert engine_parameters(shape, EngineLayout(1))["lm_head.weight"] == (64, 8)


def test_tied_embeddings_are_one_parameter() -> None:
    assert "lm_head.weight" not in engine_parameters(SHAPES["qwen2_tied"], EngineLayout(1))


@pytest.mark.parametrize(("by_experts", "experts", "rows"), [(False, (0, 8), (4, 8)), (True, (4, 8), (0, 8))])
def test_experts_are_cut_or_dealt_whole(by_experts: bool, experts: tuple[int, int], rows: tuple[int, int]) -> None:
    """Rank 1 of 2 has the second half of every expert, or the second four of the eight."""
    layout = EngineLayout(2, by_experts)
    (up,) = shards_of(SHAPES["qwen3_moe"], layout, "layers.0.mlp.experts.*.up_proj.weight")[1]
    (down,) = shards_of(SHAPES["qwen3_moe"], layout, "layers.0.mlp.experts.*.down_proj.weight")[1]
    assert list(zip(up.box.start, up.box.stop, strict=True)) == [experts, rows, (0, 8)]
    assert list(zip(down.box.start, down.box.stop, strict=True)) == [experts, (0, 8), rows]
    assert up.local_start == (0, rows[1] - rows[0], 0)  # after gate
    assert down.local_start == (0, 0, 0)


def test_the_parameters_of_published_models() -> None:
    """As vLLM builds them: DeepSeek-V3 on 32 ranks, Qwen3-235B on 8 by experts, which has 4 key-value heads."""
    deepseek = engine_parameters(shape_of(DEEPSEEK_V3_BF16), EngineLayout(32))
    layer = "model.layers.3."
    assert deepseek["model.embed_tokens.weight"] == (4040, 7168)
    assert deepseek[layer + "self_attn.fused_qkv_a_proj.weight"] == (1536 + 512 + 64, 7168)
    assert deepseek[layer + "self_attn.kv_b_proj.weight"] == (4 * 256, 512)
    assert deepseek[layer + "mlp.experts.routed_experts.w13_weight"] == (256, 2 * 64, 7168)
    assert deepseek[layer + "mlp.experts.routed_experts.w2_weight"] == (256, 7168, 64)
    assert deepseek[layer + "mlp.shared_experts.gate_up_proj.weight"] == (2 * 64, 7168)
    assert deepseek["model.layers.0.mlp.down_proj.weight"] == (7168, 576)
    qwen3 = engine_parameters(shape_of(QWEN3_235B_A22B), EngineLayout(8, expert_parallel=True))
    assert qwen3[layer + "self_attn.qkv_proj.weight"] == ((8 + 1 + 1) * 128, 4096)
    assert qwen3[layer + "mlp.experts.routed_experts.w13_weight"] == (16, 2 * 1536, 4096)

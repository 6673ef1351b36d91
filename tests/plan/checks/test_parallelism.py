"""Layouts that do not suit a model are refused by what does not divide what, and the nearest that do are named."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from rlhpc.config.schema import RolloutSection
from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, shape_of
from rlhpc.plan.checks.parallelism import check_engine, fitting_layout, misfits, nearest_layouts
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import megatron_shards
from tests.helpers.published import DEEPSEEK_V3_BF16, MIXTRAL_8X7B, QWEN3_30B_A3B

DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "mixtral": MIXTRAL_8X7B,
    "qwen3_moe": QWEN3_30B_A3B,
    "deepseek": DEEPSEEK_V3_BF16,
}


def shape(model: str, **changes: Any) -> ModelShape:
    return shape_of({**MODELS[model], **changes})


def refused(model: ModelShape, world_size: int, **parallel: Any) -> str:
    with pytest.raises(UserError) as caught:
        fitting_layout(ParallelSection(**parallel), world_size, model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "world_size", "parallel", "message"),
    [
        (
            shape("dense"),
            3,
            {"tp": 3},
            "actor.parallel.tp: 3 does not divide the model's 8 attention heads (config.json); nearest that fit",
        ),
        (
            shape("dense", intermediate_size=30),
            4,
            {"tp": 4},
            "actor.parallel.tp: 4 does not divide the model's 30 feed-forw",
        ),
        (
            shape("dense", num_attention_heads=12, num_key_value_heads=3, hidden_size=24),
            2,
            {"tp": 2},
            "actor.parallel.tp: 2 and the model's 3 key-value heads (config.json) do not divide one another; nearest "
            "that fit: tp 1 x dp 2",
        ),
        (
            shape("dense", vocab_size=5, num_key_value_heads=4),
            4,
            {"tp": 4},
            "actor.parallel.tp: 4 leaves a rank no row of the model's vocabulary of 5 (config.json)",
        ),
        (
            shape("deepseek", n_shared_experts=3, moe_intermediate_size=10),
            4,
            {"tp": 4},
            "30 feed-forward size of share",
        ),
        (
            shape("dense"),
            16,
            {"tp": 4, "cp": 4, "cp_method": "ulysses"},
            "actor.parallel.cp: 4 does not divide the 2 attention heads of a rank, as cp_method ulysses needs; "
            "nearest that fit: tp 2 x cp 4 x dp 2 | tp 4 x cp 2 x dp 2 | ",
        ),
        (
            shape("dense"),
            2,
            {"ep": 2},
            "actor.parallel.ep: 2 ranks are to share experts, which the model does not have; near",
        ),
        (
            shape("dense"),
            2,
            {"etp": 2},
            "actor.parallel.etp: 2 ranks are to share experts, which the model does not have",
        ),
        (
            shape("mixtral"),
            48,
            {"ep": 3},
            "actor.parallel.ep: 3 does not divide the model's 8 experts (config.json); nearest that fit: tp 1",
        ),
        (
            shape("qwen3_moe"),
            5,
            {"etp": 5},
            "actor.parallel.etp: 5 does not divide the model's 768 feed-forward size of an ex",
        ),
        (
            shape("mixtral"),
            2,
            {"tp": 2, "sequence_parallel": False},
            "actor.parallel.sequence_parallel: a model with experts needs it at tp 2; set it to true, or tp to 1",
        ),
        (
            shape("deepseek", first_k_dense_replace=61),
            2,
            {"tp": 2, "sequence_parallel": False},
            "actor.parallel.sequence_parallel: a model with latent attention needs it at tp 2",
        ),
        (
            shape("dense"),
            4,
            {"pp": 4},
            "actor.parallel.pp: 6 layers do not divide into 4 pipeline stages; nearest that fit: ",
        ),
        (
            shape("dense"),
            2,
            {"pp": 2, "vpp": 2},
            "actor.parallel.vpp: the 3 layers of a pipeline stage do not divide into 2 v",
        ),
        (
            shape("dense"),
            2,
            {"vpp": 2},
            "actor.parallel.vpp: 2 has a meaning only with several pipeline stages (pp > 1)",
        ),
        (
            shape("dense"),
            2,
            {"first_stage_layers": 2},
            "actor.parallel.first_stage_layers: 2 has a meaning only with several",
        ),
        (
            shape("dense"),
            3,
            {"pp": 3, "last_stage_layers": 1},
            "actor.parallel.pp: 5 of the 6 layers do not divide into 2 oth",
        ),
        (
            shape("dense"),
            6,
            {"tp": 4},
            "actor.parallel: tp 4 x cp 1 x pp 1 = 4 ranks does not divide the 6 ranks of the job "
            "(slurm.nodes x resources.ranks_per_node); nearest that fit: tp 2 x dp 3 | ",
        ),
        (
            shape("mixtral"),
            4,
            {"ep": 8},
            "parallel: etp 1 x ep 8 x pp 1 = 8 ranks does not divide the 4 ranks of the job "
            "(slurm.nodes x resources.ranks_per_node); nearest that fit: tp 1 x dp 4, experts ep 4 x dp 1 | ",
        ),
    ],
)
def test_the_reason_and_the_nearest_are_named(
    model: ModelShape, world_size: int, parallel: dict[str, Any], message: str
) -> None:
    assert message in refused(model, world_size, **parallel)


def test_what_fits_is_the_layout_asked_for() -> None:
    fitting_layout(ParallelSection(tp=4, cp=2, cp_method="ulysses"), 8, shape("dense"))
    fitting_layout(ParallelSection(tp=4, cp=4), 16, shape("dense"))
    section = ParallelSection(tp=8, pp=16, ep=64, last_stage_layers=1)
    layout = fitting_layout(section, 2048, shape("deepseek"))
    assert layout == ParallelLayout(2048, tp=8, pp=16, ep=64, last_stage_layers=1)


def test_an_expert_s_part_on_a_rank_suits_grouped_products() -> None:
    """768 rows on 64 ranks are 12 each, whose 24 bytes are not a multiple of 16."""
    text = refused(shape("qwen3_moe"), 64, etp=64)
    assert text.startswith("actor.parallel.etp: 64 leaves a rank 12 of the model's 768 feed-forward size of an expert")
    assert fitting_layout(ParallelSection(etp=32), 32, shape("qwen3_moe")).etp == 32


def test_key_value_heads_of_latent_attention_do_not_matter() -> None:
    fitting_layout(ParallelSection(tp=128), 128, shape("deepseek", num_key_value_heads=3))


@pytest.mark.heavy
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_named_fits_and_can_be_planned(model: str) -> None:
    found, asked = shape(model), ParallelSection(tp=3, pp=5, cp=2, ep=3, etp=3, vpp=3)
    for world_size in (8, 48, 90):
        layouts = nearest_layouts(found, asked, world_size)
        assert 0 < len(layouts) <= 3
        for layout in layouts:
            assert list(misfits(found, layout, asked)) == []
            assert layout.world_size == world_size
            assert megatron_shards(found, layout, world_size - 1)


def test_the_nearest_come_first_and_change_no_more_than_they_must() -> None:
    def texts(model: str, world_size: int, **parallel: Any) -> list[str]:
        return [layout.text for layout in nearest_layouts(shape(model), ParallelSection(**parallel), world_size)]

    # Of 61 layers on 16 ranks, one must be alone on the last.
    deepseek = {"tp": 8, "pp": 16, "ep": 64}
    assert texts("deepseek", 2048, **deepseek)[0] == "tp 8 x pp 16 (last stage of 1) x dp 16, experts ep 64 x dp 2"
    assert texts("deepseek", 2048, **deepseek, vpp=2)[0] == texts("deepseek", 2048, **deepseek)[0]
    assert texts("dense", 12, tp=3, pp=2, vpp=3)[0] == "tp 2 x pp 2 (vpp 3) x dp 3"
    assert texts("dense", 12, tp=3, pp=2, vpp=1) == ["tp 2 x pp 2 x dp 3", "tp 1 x pp 2 x dp 6"]
    # Only ep is wrong, so only ep is changed, by the smallest factor first.
    assert texts("mixtral", 48, ep=3) == [
        "tp 1 x dp 48, experts ep 4 x dp 12",
        "tp 1 x dp 48, experts ep 2 x dp 24",
        "tp 1 x dp 48, experts ep 8 x dp 6",
    ]
    assert texts("mixtral", 48, tp=3, ep=3)[0] == "tp 4 x dp 12, experts ep 4 x dp 12"
    assert texts("dense", 4, tp=2, ep=2) == ["tp 2 x dp 2"]


@pytest.mark.parametrize("layers", [61, 66, 80, 94])
def test_the_nearest_are_distinct_and_their_stages_even(layers: int) -> None:
    """A changed number of stages keeps no first stage of 14 that leaves 66 layers to the second."""
    dense = shape("dense", num_hidden_layers=layers)
    for world_size, asked in (
        (56, {"pp": 7}),
        (64, {"pp": 4, "vpp": 4}),
        (64, {"pp": 2, "first_stage_layers": 14, "last_stage_layers": 14}),
        (64, {"pp": 8, "first_stage_layers": 14}),
        (24, {"tp": 3, "pp": 8}),
        (8, {"pp": 3}),
    ):
        layouts = nearest_layouts(dense, ParallelSection(**asked), world_size)
        stages = [layout.stage_layers(layers) for layout in layouts]
        alike = [replace(layout, first_stage_layers=None, last_stage_layers=None) for layout in layouts]
        divisions = [(layout, *counts) for layout, counts in zip(alike, stages, strict=True)]
        assert len(set(divisions)) == len(divisions), (asked, layouts)
        assert all(max(counts) <= 1.25 * layers / len(counts) + 1 for counts in stages), (asked, stages)


def test_only_layouts_that_suit_are_proposed() -> None:
    asked, dense = ParallelSection(tp=3), shape("dense")
    with pytest.raises(UserError, match=r"nearest that fit: tp 8 x dp 1$"):
        fitting_layout(asked, 8, dense, lambda layout: layout.tp * layout.pp == 8)
    with pytest.raises(UserError, match=r"nearest that fit: tp 4 x pp 2 x dp 1"):
        fitting_layout(asked, 8, dense, lambda layout: layout.tp == 4 and layout.pp == 2)
    with pytest.raises(UserError, match=r"nearest: tp 4 x dp 2 \| .*, but with too little GPU memory or data$"):
        fitting_layout(asked, 8, dense, lambda layout: False)


def test_the_search_is_quick_on_ten_thousand_ranks() -> None:
    start = time.process_time()
    assert nearest_layouts(shape("deepseek"), ParallelSection(tp=8, pp=12, cp=2, ep=48), 10080)
    assert time.process_time() - start < 1


def test_data_parallelism_alone_is_left_where_nothing_divides() -> None:
    assert "nearest that fit: tp 1 x dp 7" in refused(shape("dense"), 7, tp=7, first_stage_layers=1)
    assert refused(shape("dense", num_hidden_layers=1), 1009, pp=1009).endswith("nearest that fit: tp 1 x dp 1009")


@pytest.mark.parametrize(
    ("model", "rollout", "message"),
    [
        (
            shape("dense"),
            {"tp": 3},
            "3 does not divide the model's 8 attention heads (config.json); use one of [1, 2, 4, 8]",
        ),
        (
            shape("dense", num_attention_heads=12),
            {"tp": 3},
            "3 and the model's 2 key-value heads (config.json) do not divide",
        ),
        (
            shape("dense", num_attention_heads=12, num_key_value_heads=3),
            {"tp": 3},
            "3 does not divide the model's 64 rows of the vocabulary, padded (config.json); use one of [1]",
        ),
        (
            shape("qwen3_moe", moe_intermediate_size=772),
            {"tp": 8},
            "8 does not divide the model's 772 feed-forward size of an",
        ),
        (
            shape("qwen3_moe", num_experts=20),
            {"tp": 8, "expert_parallel": True},
            "8 does not divide the model's 20 experts (config.json); use one of [1, 2, 4]",
        ),
    ],
)
def test_engine_sizes_that_do_not_divide_the_model_are_refused(
    model: ModelShape, rollout: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_engine(model, RolloutSection(**rollout))
    assert str(caught.value).startswith(f"rollout.tp: {message}")


def test_whole_experts_need_not_be_divided() -> None:
    check_engine(shape("qwen3_moe", moe_intermediate_size=772), RolloutSection(tp=8, expert_parallel=True))

"""Published models with experts: every field of their config.json is understood, and their sizes come out right."""

from __future__ import annotations

import time
from math import prod
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.models import LatentAttention, ModelShape, shape_of
from rlhpc.sharding.shards import model_tensors
from tests.helpers.published import DEEPSEEK_V3, DEEPSEEK_V3_BF16, MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN3_235B_A22B


def _billions(shape: ModelShape) -> float:
    return sum(prod(tensor.shape) for tensor in model_tensors(shape)) / 1e9


@pytest.mark.parametrize(
    ("fields", "billions"),
    # As their model cards say; DeepSeek-V3 without its further-token layer.
    [(MIXTRAL_8X7B, 46.70), (QWEN3_30B_A3B, 30.53), (QWEN3_235B_A22B, 235.09), (DEEPSEEK_V3_BF16, 671.03)],
)
def test_published_models_are_read_whole(fields: dict[str, Any], billions: float) -> None:
    assert _billions(shape_of(fields)) == pytest.approx(billions, abs=0.01)


def test_mixtral_has_experts_in_every_layer() -> None:
    experts = shape_of(MIXTRAL_8X7B).experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.ffn_size, len(experts.layers)) == (8, 2, 14336, 32)
    assert (experts.score, experts.normalise, experts.bias, experts.shared_ffn_size) == ("softmax", True, False, 0)
    assert shape_of({**MIXTRAL_8X7B, "rope_theta": None}).rope.theta == 1e6


def test_qwen3_layers_without_experts() -> None:
    changes = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 8, "norm_topk_prob": False}
    shape = shape_of({**QWEN3_30B_A3B, **changes})
    assert shape.experts is not None
    assert shape.experts.layers == (1, 5, 7)
    assert not shape.experts.normalise
    names = {tensor.name for tensor in model_tensors(shape)}
    assert "model.layers.3.mlp.gate_proj.weight" in names
    assert "model.layers.3.mlp.gate.weight" not in names
    assert "model.layers.5.mlp.experts.127.up_proj.weight" in names
    assert "model.layers.5.mlp.up_proj.weight" not in names


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        (DEEPSEEK_V3_BF16, {"first_k_dense_replace": 61}),
        (QWEN3_30B_A3B, {"mlp_only_layers": list(range(48))}),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 49}),
    ],
)
def test_a_model_whose_layers_are_all_dense_has_no_experts(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    shape = shape_of({**fields, **changes})
    assert shape.experts is None
    names = {tensor.name for tensor in model_tensors(shape)}
    assert {f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(shape.num_layers)} <= names
    assert not any("experts" in name or "mlp.gate.weight" in name for name in names)


def test_qwen3_number_of_experts_under_both_names() -> None:
    """transformers 5 writes num_local_experts."""
    fields = {**QWEN3_30B_A3B, "num_local_experts": 64}
    del fields["num_experts"]
    shape = shape_of(fields)
    assert shape.experts is not None
    assert shape.experts.num_experts == 64


@pytest.mark.heavy
def test_deepseek_v3() -> None:
    shape = shape_of(DEEPSEEK_V3_BF16)
    experts, latent = shape.experts, shape.latent
    assert experts is not None
    assert experts.layers == tuple(range(3, 61))
    assert (experts.score, experts.bias, experts.shared_ffn_size, experts.scale) == ("sigmoid", True, 2048, 2.5)
    assert (experts.num_groups, experts.groups_kept) == (8, 4)
    assert latent == LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert (shape.head_dim, shape.rope_dim, shape.rope.kind) == (192, 64, "yarn")
    assert shape.softmax_scale == pytest.approx(0.135234, abs=1e-6)  # 192 ** -0.5 * (0.1 * ln 40 + 1) ** 2
    assert not any(tensor.name.startswith("model.layers.61.") for tensor in model_tensors(shape))


def test_one_group_is_none() -> None:
    """As in Kimi K2 and Moonlight, whose six or eight experts are not two to a group."""
    experts = shape_of({**DEEPSEEK_V3_BF16, "n_group": 1, "topk_group": 1}).experts
    assert experts is not None
    assert (experts.num_groups, experts.groups_kept) == (None, None)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (DEEPSEEK_V3, {}, r"quantised \(quantization_config\); convert them to bfloat16: `rlhpc convert SRC DST "),
        (
            DEEPSEEK_V3_BF16,
            {"topk_method": "group_limited_greedy"},
            r"topk_method = 'group_limited_greedy' is not supp",
        ),
        (DEEPSEEK_V3_BF16, {"scoring_func": "softmax"}, r"scoring_func = 'softmax' is not supported"),
        (DEEPSEEK_V3_BF16, {"moe_layer_freq": 2}, r"moe_layer_freq = 2 is not supported"),
        (DEEPSEEK_V3_BF16, {"norm_topk_prob": False}, r"norm_topk_prob = False is not supported"),
        (DEEPSEEK_V3_BF16, {"topk_group": 2}, r"num_experts_per_tok 8 with topk_group 2 is not supported"),
        (DEEPSEEK_V3_BF16, {"n_routed_experts": 255}, r"8 groups do not divide the 255 experts"),
        (DEEPSEEK_V3_BF16, {"rms_norm_eps": 1e-5}, r"rms_norm_eps = 1e-05 is not supported; supported: 1e-06"),
        (DEEPSEEK_V3_BF16, {"head_dim": 56}, r"head_dim = 56 is not supported; supported: None, 64"),
        (DEEPSEEK_V3_BF16, {"index_topk": 2048}, r"'index_topk' = 2048 is not understood"),
        (MIXTRAL_8X7B, {"sliding_window": 4096}, r"sliding_window = 4096 is not supported"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, r"router_jitter_noise = 0.1 is not supported"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 1}, r"num_experts_per_tok = 1 of 8 experts is not supported; .* 2 to 8"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, r"num_experts_per_tok = 129 of 128 experts is not supported"),
        (QWEN3_30B_A3B, {"attention_bias": True}, r"attention_bias = True is not supported"),
        (
            QWEN3_30B_A3B,
            {"shared_expert_intermediate_size": 5632},
            r"'shared_expert_intermediate_size' = 5632 is not u",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of({**fields, **changes})


def test_without_dense_layers_and_shared_experts() -> None:
    experts = shape_of({**DEEPSEEK_V3_BF16, "first_k_dense_replace": None, "n_shared_experts": None}).experts
    assert experts is not None
    assert (experts.layers, experts.shared_ffn_size) == (tuple(range(61)), 0)


def test_planning_the_largest_model_is_quick() -> None:
    shape = shape_of(DEEPSEEK_V3_BF16)
    start = time.process_time()
    assert len(model_tensors(shape)) == 45395
    assert time.process_time() - start < 2

"""Tiny copies of configurations: each kind of layer, and what chooses between branches of the code."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.backends.fsdp.tiny_config import VOCABULARY, WINDOW, pick_layers, tiny_settings

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "eos_token_id": 128009,
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


def test_sizes_are_small_and_everything_else_stays() -> None:
    tiny = tiny_settings(LLAMA)
    assert (tiny["num_attention_heads"], tiny["num_key_value_heads"], tiny["head_dim"]) == (8, 2, 16)
    assert (tiny["hidden_size"], tiny["num_hidden_layers"], tiny["vocab_size"]) == (128, 2, VOCABULARY)
    assert tiny["eos_token_id"] < VOCABULARY
    for key in ("rope_parameters", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps"):
        assert tiny[key] == LLAMA[key]


def test_an_engine_has_heads_of_the_real_size() -> None:
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "clip_qkv": 8.0}
    tiny = tiny_settings({**LLAMA, **latent}, real_heads=True)
    assert (tiny["num_attention_heads"], tiny["head_dim"], tiny["hidden_size"]) == (8, 128, 1024)
    assert (tiny["q_lora_rank"], tiny["kv_lora_rank"]) == (1536, 512)
    assert tiny["clip_qkv"] == 3.0, "as few activations are above the real one"


@pytest.mark.parametrize(
    ("heads", "tiny"),
    [((32, 8), (8, 2)), ((14, 2), (6, 2)), ((15, 5), (9, 3)), ((12, 12), (4, 4)), ((9, 9), (3, 3)), ((71, 1), (3, 1))],
)
def test_heads_keep_parities(heads: tuple[int, int], tiny: tuple[int, int]) -> None:
    """The exchange between two ranks depends on whether they can divide the heads."""
    assert heads[0] % 2 == tiny[0] % 2
    found = tiny_settings({**LLAMA, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]})
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == tiny


@pytest.mark.parametrize(("hidden", "ratio"), [(4096, 1.0), (2048, 2.0), (8192, 2 / 3)])
def test_heads_are_wider_or_narrower_than_the_hidden_size(hidden: int, ratio: float) -> None:
    found = tiny_settings({**LLAMA, "hidden_size": hidden})
    assert found["num_attention_heads"] * found["head_dim"] / found["hidden_size"] == pytest.approx(ratio)


def test_windows_and_chunks_are_shorter_than_a_document() -> None:
    given = {"sliding_window": 4096, "attention_chunk_size": 8192, "max_window_layers": 28, "use_sliding_window": True}
    found = tiny_settings({**LLAMA, **given})
    assert (found["sliding_window"], found["attention_chunk_size"]) == (WINDOW, WINDOW)
    assert (found["max_window_layers"], found["use_sliding_window"]) == (28, True)
    assert tiny_settings({**LLAMA, "sliding_window": None})["sliding_window"] is None


def test_experts_and_latent_sizes() -> None:
    latent = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "head_dim": 64}
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "kv_lora_rank": 512}
    found = tiny_settings({**LLAMA, **latent, **experts, "num_key_value_heads": 32})
    assert [found[key] for key in latent] == [16, 8, 24, 16, 8]
    assert [found[key] for key in experts] == [4, 2, 2, 1, 16]


def test_parts_of_a_model_are_made_tiny() -> None:
    found = tiny_settings(
        {"text_config": LLAMA, "vision_config": {**LLAMA, "patch_size": 14}, "image_token_id": 255999}
    )
    assert found["text_config"] == tiny_settings(LLAMA)
    assert (found["vision_config"]["hidden_size"], found["vision_config"]["patch_size"]) == (128, 14)
    assert found["image_token_id"] == 255999


def test_frequencies_are_those_of_the_tiny_heads() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    sections = {"mrope_section": [16, 24, 24]}
    found = tiny_settings({**LLAMA, "rope_parameters": {"full_attention": factors, "sliding_attention": sections}})
    kinds = found["rope_parameters"]
    assert kinds["full_attention"] == {**factors, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert sum(kinds["sliding_attention"]["mrope_section"]) == 8


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alike": ({}, {"num_hidden_layers": 2}),
    "by type": (
        {"layer_types": ["sliding"] * 5 + ["full"] + ["sliding"] * 26, "sliding_window_pattern": 6},
        {"num_hidden_layers": 2, "layer_types": ["sliding", "full"], "sliding_window_pattern": 6},
    ),
    "first ones dense": (
        {"first_k_dense_replace": 3, "layer_types": ["full"] * 32},
        {"num_hidden_layers": 2, "first_k_dense_replace": 1, "layer_types": ["full"] * 2},
    ),
    "by number": (
        {"mlp_only_layers": [4, 9], "decoder_sparse_step": 1},
        {"num_hidden_layers": 2, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    "periodic": ({"attn_layer_period": 4}, {"num_hidden_layers": 4, "attn_layer_period": 4}),
    "pattern": (
        {"hybrid_override_pattern": "MM*-" * 8, "num_kv_shared_layers": 30},
        {"num_hidden_layers": 4, "hybrid_override_pattern": "M*-M", "num_kv_shared_layers": 3},
    ),
    "by key": (
        {"per_layer_config": {"05": {"x": 1}, "31": {"x": 1}}},
        {"num_hidden_layers": 2, "per_layer_config": {"1": {"x": 1}}},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_kind_of_layer_is_there(name: str) -> None:
    given, expected = LAYERS[name]
    assert pick_layers({"num_hidden_layers": 32, **given}) == expected

"""Reading config.json: what is understood, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.models import shape_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def _with(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


def test_defaults_follow_huggingface() -> None:
    shape = shape_of(LLAMA)
    assert (shape.num_kv_heads, shape.head_dim, shape.tied_embeddings) == (4, 32, False)
    assert (shape.rope.kind, shape.rope.theta) == ("llama3", 10000.0)
    assert shape.rope.parameters == {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_rope_parameters_of_transformers_5_are_read() -> None:
    fields = _with(rope_scaling=None, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert shape_of(fields).rope.theta == 5e5


def test_features_of_families() -> None:
    assert shape_of(_with(architectures=["Qwen2ForCausalLM"], num_key_value_heads=4)).qkv_bias
    assert shape_of(_with(architectures=["Qwen3ForCausalLM"], num_key_value_heads=4)).qk_norm


def test_switches_of_published_models_that_are_off_are_accepted() -> None:
    """As in the files of Qwen2.5-0.5B."""
    off = {"use_mrope": False, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24}
    fields = _with(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, **off)
    assert shape_of(fields).family == "qwen2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLMM"]}, r"'Qwen2ForCausalLMM' is not supported; did you mean 'Qwen2For"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"attention_bias": True}, r"attention_bias = True is not supported"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_mrope": True}, r"use_mrope = True is not supported"),
        ({"logit_softcap": 30.0}, r"'logit_softcap' = 30.0 is not understood by this model family"),
        ({"vocab_size": None}, r"'vocab_size' is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_type = 'dynamic' is not supported; supported: "),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"'high_freq_factor' is missing from .* 'llama3'"),
        ({"rope_scaling": {"mrope_section": [16]}}, r"'mrope_section' = \[16\] is not understood for rope_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"the weights are quantised .* convert them to bfloat16"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of(_with(**changes))


def _refusal(**changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        shape_of(_with(**changes))
    return str(caught.value)


def test_an_architecture_like_llama_gets_the_page_on_own_families() -> None:
    """Mistral's name differs from Mixtral's by one letter, and is no misspelling of it."""
    line = _refusal(architectures=["MistralForCausalLM"], sliding_window=4096)
    assert "'MistralForCausalLM' is not supported; " in line
    assert 'docs/models.md, "A family of your own"' in line
    assert "did you mean" not in line
    assert "\n## A family of your own\n" in (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_an_architecture_unlike_llama_gets_the_supported_ones() -> None:
    """Another activation, and no feed-forward part at all."""
    for line in (
        _refusal(architectures=["GemmaForCausalLM"], hidden_act="gelu_pytorch_tanh"),
        _refusal(architectures=["MambaForCausalLM"], intermediate_size=None),
    ):
        assert "use a model of one of DeepseekV3ForCausalLM, LlamaForCausalLM, " in line
        assert "did you mean" not in line

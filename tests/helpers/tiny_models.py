"""Saves small random models of every family in HuggingFace's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DSV3: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 16,  # transformers reads the rotary embedding's size from it
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "dsv3": ("DeepseekV3", {**_DSV3, "rope_parameters": _YARN}),
    "dsv3_direct": ("DeepseekV3", {**_DSV3, "q_lora_rank": None, "rope_interleave": False}),
}
# Families that are not in the package: of a user, and without any description.
OUTSIDE: dict[str, tuple[str, dict[str, Any]]] = {"mistral": ("Mistral", {"sliding_window": None})}
# vLLM has its router's weights in float32 in a model of any dtype.
FLOAT32_ROUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": (
        "Glm4Moe",
        {
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    )
}
_CONFIGS = {"Gemma3": "Gemma3Text"}  # configurations named otherwise than the model
_WINDOW: dict[str, Any] = {"sliding_window": 16}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
UNDESCRIBED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "Gemma3",
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, **_WINDOW, **_ALTERNATING},
    ),
    "mistral_window": ("Mistral", _WINDOW),
    "phi3": ("Phi3", {"sliding_window": None}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "embedding_multiplier": 3.0,
        },
    ),
    "starcoder2": ("Starcoder2", _WINDOW),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-5,  # vLLM knows no other
            **_WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


def make_model(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """Save a model of ``kind`` to ``folder``, with non-trivial norms and biases.

    ``changes``: fields of its config, such as num_hidden_layers (default: 2).
    """
    import torch
    import transformers

    family, own = {**KINDS, **OUTSIDE, **UNDESCRIBED, **FLOAT32_ROUTER}[kind]
    config = getattr(transformers, f"{_CONFIGS.get(family, family)}Config")(**{**_COMMON, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1) if param.dim() == 1 else param.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder

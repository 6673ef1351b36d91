"""Small random models of transformers' architectures, and documents to compute on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WINDOW = 16  # shorter than the longest document
LENGTHS = (40, 7, 25, 1, 24)
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_WIDE: dict[str, Any] = {"head_dim": 32}  # heads wider than hidden_size / num_attention_heads
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# By model_type in config.json: what differs from the common sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": _WIDE,
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**_WIDE, **_MIXED, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_WIDE, **_MIXED, "query_pre_attn_scalar": 24},
    "phi3": {},
    "olmo2": {},
    "glm4": _WIDE,
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "starcoder2": {"sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_oss": {**_WIDE, **_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN},
    "qwen3_moe": {**_WIDE, **_EXPERTS, "num_experts": 4},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "stablelm": {},
}
# Models of which attention is refused.
REFUSED: dict[str, dict[str, Any]] = {
    "llama4_text": {**_WIDE, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": WINDOW},
    "phimoe": {"sliding_window": WINDOW, "num_local_experts": 2},
    "qwen3_next": {
        **_WIDE,
        **_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 2,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def config_of(kind: str, **changes: Any) -> Any:
    """The model's configuration."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**_COMMON, **{**ARCHITECTURES, **REFUSED}[kind], **changes})


def build(kind: str, attention: str, **changes: Any) -> torch.nn.Module:
    """A model in float32 with the same random weights in every process, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    config = config_of(kind, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape)
                # Norms and biases start as constants; other weights as too small for attention to matter.
                parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 0.12 * noise)
    return model.eval()


def documents() -> list[Tensor]:
    """Random tokens of documents with ``LENGTHS``."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, _COMMON["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def loss_of(logits: Tensor) -> Tensor:
    """A sum of logits [T, vocab] with random weights, so that each of them has a gradient."""
    return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum() / len(logits)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by name, which are taken from the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def farthest_gradient(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Maximum difference of two models' gradients, relative to the largest number of each parameter."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-6)) for n in theirs)

"""config.json of published models: of those that ready configurations are for, the shipped files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_READY = Path(__file__).parents[2] / "rlhpc" / "configs" / "ready" / "models"


def _shipped(name: str) -> dict[str, Any]:
    return json.loads((_READY / name / "config.json").read_text())


MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_235B_A22B = _shipped("Qwen3-235B-A22B")
QWEN3_30B_A3B = {
    **QWEN3_235B_A22B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
DEEPSEEK_V3_BF16 = _shipped("DeepSeek-V3")
_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK_V3 = {**DEEPSEEK_V3_BF16, "quantization_config": _BLOCKS}
QWEN25_72B = _shipped("Qwen2.5-72B")

"""Models of acceptance: published shapes with random weights, because the machine may have no network.

``model_shape`` is torch-free. ``write_model`` needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.safetensors_headers import INDEX, NewFile, index_text, plan_files
from rlhpc.models import ModelShape, shape_of
from rlhpc.sharding.shards import TensorSpec, model_tensors

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "q_lora_rank": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
_TINY_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}

# Fields of config.json. The tiny shapes have the structure of the large ones and run in seconds on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**_QWEN2, **_TINY},
    "tiny-moe": {
        **_QWEN3_MOE,
        **_TINY,
        **_TINY_EXPERTS,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 4,  # more than two, so that the order of summation matters
    },
    "tiny-mla": {
        **_DEEPSEEK_V3,
        **_TINY,
        **_TINY_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,  # vLLM's CPU build supports only the published sizes
        "qk_rope_head_dim": 64,
        "head_dim": 64,  # of the rotary embedding, as transformers reads it
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "rope_theta": 10000.0,
    },
    # Qwen2.5-1.5B
    "1.5b": {
        **_QWEN2,
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    # Llama-3.1-8B
    "8b": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    # Qwen3-30B-A3B
    "30b-a3b": {
        **_QWEN3_MOE,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
    # Moonlight-16B-A3B: latent attention, shared experts
    "16b-a3b-mla": {
        **_DEEPSEEK_V3,
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "rope_theta": 50000.0,
    },
}
END_TOKEN, PAD_TOKEN = 3, 0  # of write_model's tokenizer
_MOST_BYTES = 4 << 30  # maximum size of a weight file
_STORED = {"bfloat16": "BF16", "float32": "F32"}


def model_fields(name: str, layers: int | None = None, dtype: str = "bfloat16") -> dict[str, Any]:
    """Fields of ``config.json``; ``layers``: number of layers, default all."""
    fields = {"hidden_act": "silu", "tie_word_embeddings": False, **SHAPES[name]}
    tokens = {"bos_token_id": None, "eos_token_id": END_TOKEN, "pad_token_id": PAD_TOKEN}
    return {**fields, "num_hidden_layers": layers or fields["num_hidden_layers"], **tokens, "dtype": dtype}


def model_shape(name: str, layers: int | None = None) -> ModelShape:
    """Shape of the model that ``write_model`` writes."""
    return shape_of(model_fields(name, layers), where=name)


def write_model(
    folder: Path,
    name: str,
    layers: int | None = None,
    *,
    weights: bool = True,
    dtype: str = "bfloat16",
    std: float = 0.02,
) -> Path:
    """Write a HuggingFace model folder: config.json, a tokenizer and, unless ``weights`` is false, random weights.

    Matrices and biases are normal with ``std``, norms normal around 1. Weights are sampled on the GPU if there is one:
    they repeat only on the same kind of device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = model_fields(name, layers, dtype)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    _make_tokenizer(fields["vocab_size"], fields["max_position_embeddings"]).save_pretrained(folder)
    if weights:
        _write_weights(folder, model_tensors(shape_of(fields, where=name)), dtype, std)
    return folder


def _write_weights(folder: Path, tensors: list[TensorSpec], dtype: str, std: float) -> None:
    import torch

    stored = [(spec.name, "F32" if spec.float32 else _STORED[dtype], spec.shape) for spec in tensors]
    files = plan_files(stored, _MOST_BYTES)
    random = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    for file in files:
        _write_file(folder, file, std, random)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # frees memory for the processes that load the model
    if len(files) > 1:
        (folder / INDEX).write_text(index_text(files), encoding="utf-8")


def _write_file(folder: Path, file: NewFile, std: float, random: Any) -> None:
    import torch

    types = {"F32": torch.float32, "BF16": torch.bfloat16}
    with open(folder / file.name, "wb") as out:
        out.write(file.header)
        for name, dtype, shape, _ in file.tensors:
            center = 1.0 if "norm" in name else 0.0
            value = torch.empty(shape, dtype=types[dtype], device=random.device)
            value.normal_(mean=center, std=std, generator=random)
            out.write(memoryview(value.view(-1).view(torch.uint8).cpu().numpy()))


def _make_tokenizer(vocab_size: int, max_length: int) -> Any:
    """Tokenizer with a token per printable character, and placeholders for other ids so that any response decodes."""
    from rlhpc.data.arithmetic import ASSISTANT, END, NONE, USER, make_tokenizer

    # "Ġ" is the blank in byte-level vocabularies, which transformers uses for every qwen2 model.
    characters = ["Ġ", *map(chr, range(ord("!"), ord("~") + 1))]
    tokens = [NONE, USER, ASSISTANT, END, *characters]
    return make_tokenizer([*tokens, *(f"<{i}>" for i in range(len(tokens), vocab_size))], max_length)

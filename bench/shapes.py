"""Published shapes of models with random weights, because the machine may have no network.

``model_shape`` is torch-free. ``write_model`` needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.safetensors_headers import INDEX, NewFile, index_text, plan_files
from rlhpc.models import ModelShape, shape_of
from rlhpc.sharding.shards import TensorSpec, model_tensors


def _family(
    architecture: str, model_type: str, context: int, eps: float, theta: float, **fields: Any
) -> dict[str, Any]:
    common = {"max_position_embeddings": context, "rms_norm_eps": eps, "rope_theta": theta}
    return {"architectures": [architecture], "model_type": model_type, **common, **fields}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def _latent(rank: int, rope: int, nope: int, value: int) -> dict[str, Any]:
    heads = {"qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}
    return {"kv_lora_rank": rank, **heads}


def _routed(experts: int, shared: int, scale: float) -> dict[str, Any]:
    return {"n_routed_experts": experts, "n_shared_experts": shared, "routed_scaling_factor": scale}


_LLAMA = _family("LlamaForCausalLM", "llama", 131072, 1e-5, 500000.0)
_QWEN2 = _family("Qwen2ForCausalLM", "qwen2", 32768, 1e-6, 1e6)
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_QWEN3_MOE = _family("Qwen3MoeForCausalLM", "qwen3_moe", 40960, 1e-6, 1e6, **_SPARSE)
_GROUPS = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_SCORES = {"q_lora_rank": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_DEEPSEEK_V3 = _family("DeepseekV3ForCausalLM", "deepseek_v3", 8192, 1e-6, 50000.0, **_GROUPS, **_SCORES)
_TINY = {**_sizes(2, 128, 256, 4, 2, 512), "max_position_embeddings": 1024}
# More than two experts per token, so that the order of summation matters.
_FEW = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
_MANY = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# vLLM's CPU build supports latent attention of the published rank only.
_FEW_LATENT = {**_routed(4, 1, 1.0), **_latent(512, 64, 32, 32), "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROTARY = {"head_dim": 64, "rope_theta": 10000.0}  # head_dim: of the rotary embedding, as transformers reads it
_MANY_LATENT = {**_routed(64, 2, 2.446), **_latent(512, 64, 128, 128), "num_experts_per_tok": 6}

# Fields of config.json. The tiny shapes have the structure of the large ones and run in seconds on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**_QWEN2, **_TINY},
    "tiny-moe": {**_QWEN3_MOE, **_TINY, **_FEW},
    "tiny-mla": {**_DEEPSEEK_V3, **_TINY, **_FEW_LATENT, **_ROTARY, "num_key_value_heads": 4},
    # Qwen2.5-1.5B, Llama-3.1-8B, Qwen3-30B-A3B, Moonlight-16B-A3B
    "1.5b": {**_QWEN2, **_sizes(28, 1536, 8960, 12, 2, 151936), "tie_word_embeddings": True},
    "8b": {**_LLAMA, **_sizes(32, 4096, 14336, 32, 8, 128256)},
    "30b-a3b": {**_QWEN3_MOE, **_sizes(48, 2048, 6144, 32, 4, 151936), **_MANY},
    "16b-a3b-mla": {
        **_DEEPSEEK_V3,
        **_sizes(27, 2048, 11264, 16, 16, 163840),
        **_MANY_LATENT,
        "moe_intermediate_size": 1408,
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

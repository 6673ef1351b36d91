"""Writes a tiny model folder and a run's inputs in milliseconds, without torch or transformers."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.models import shape_of
from rlhpc.sharding.shards import model_tensors

FIELDS: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a Qwen2 model of zeros with a tokenizer of ten words; ``changes``: fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**FIELDS, **changes}
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(shape_of(fields))}
    write_safetensors(folder / "model.safetensors", shapes)
    vocab = {f"word{number}": number for number in range(10)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": [{"id": 10, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of float32 zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_inputs(folder: Path, **changes: Any) -> Path:
    """Write model, prompts and a config.yaml that uses them to ``folder``; returns the path of the config."""
    write_model(folder / "model", **changes)
    row = {"prompt": [{"role": "user", "content": "word1"}], "data_source": "test", "reward_model": {}}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    config = folder / "config.yaml"
    config.write_text(
        f"name: tiny\nrun_dir: {folder / 'run'}\nmodel:\n  path: {folder / 'model'}\n"
        f"data:\n  train: [{folder / 'train.jsonl'}]\n  max_prompt_tokens: 32\n"
        "rollout:\n  samples_per_prompt: 4\n  max_response_tokens: 32\n"
        "train:\n  steps: 3\n  prompts_per_step: 8\n"
    )
    return config


def write_other_model(folder: Path, **changes: Any) -> Path:
    """Write an OLMo 2 of zeros, which no family describes, over the folder of ``write_model``."""
    own = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_key_value_heads": 4}
    fields = {**FIELDS, **own, **changes}
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    hidden, ffn, vocab = (fields[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(fields["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{name}self_attn.{part}_norm.weight": (hidden,) for part in "qk"}
        shapes |= {f"{name}mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (hidden, ffn)
        shapes |= {f"{name}post_{part}_layernorm.weight": (hidden,) for part in ("attention", "feedforward")}
    write_safetensors(folder / "model.safetensors", {**shapes, "model.norm.weight": (hidden,)})
    return folder


def write_other_inputs(folder: Path, **changes: Any) -> Path:
    """The inputs of ``write_inputs`` with the model of ``write_other_model``."""
    config = write_inputs(folder)
    write_other_model(folder / "model", **changes)
    return config

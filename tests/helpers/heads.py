"""A policy whose next token depends on the last and one other before it, and heads on its hidden states that know it.

The first half of a hidden state is the token's embedding. The policy's first layer attends to the other token, whose
embedding it adds as the second half; its further layers add nothing. A head's keys, values and inputs must all be right
for its guesses to be.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhpc.models.heads import read_head
from tests.helpers.tiny_models import make_model

_HIDDEN, _HALF, _HEAD = 128, 64, 32  # sizes of hidden states, of embeddings, of attention heads
_FOCUS = 12.0  # norm of queries and keys, per pair of dimensions: attention is to one position up to 2e-8
_NORM = math.sqrt(_HALF)  # of an embedding: two of them are a hidden state whose norm layer changes nothing


def make_policy(folder: Path, seed: int, vocab_size: int, distance: int = 1) -> Path:
    """Saves a Qwen2 model like that to ``folder``, of two layers. ``distance``: of the other token, from the last."""
    make_model(folder, "qwen2", seed, vocab_size=vocab_size)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        tensor.fill_(1.0 if "norm" in name else 0.0)
    tensors["model.embed_tokens.weight"].copy_(_embedding(vocab_size, generator))
    tensors["lm_head.weight"].normal_(std=2 / math.sqrt(_HIDDEN), generator=generator)
    first = "model.layers.0.self_attn."
    query, key = _attending(distance)
    tensors[f"{first}q_proj.bias"].copy_(query.repeat(4))
    tensors[f"{first}k_proj.bias"].copy_(key.repeat(2))
    tensors[f"{first}v_proj.weight"][:, :_HALF] = torch.eye(_HALF) / math.sqrt(2)  # norms scale embeddings by sqrt(2)
    tensors[f"{first}o_proj.weight"].copy_(_first_of_groups())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_eagle(folder: Path, policy: Path, distance: int = 1, **more: Tensor) -> Path:
    """Saves an EAGLE head: half of the second half of a hidden state comes from the policy's, half by its attention;
    all by its attention if the other token is not the one before."""
    query, key = _attending(distance)
    share = 0.5 if distance == 1 else 0.0  # of the policy's hidden state
    fc = torch.zeros(_HIDDEN, 2 * _HIDDEN)
    fc[:_HALF, :_HALF] = torch.eye(_HALF)
    fc[_HALF:, _HIDDEN : _HIDDEN + _HALF] = share * torch.eye(_HALF)
    value = torch.cat([torch.eye(_HALF), torch.zeros(_HALF, _HALF)], dim=1)
    tensors = {
        "fc.weight": fc,
        **_attention("layers.0.", query.repeat(4), key.repeat(2), value, (1 - share) * _first_of_groups()),
    }
    fields = _fields(policy, num_key_value_heads=2, architectures=["LlamaForCausalLM"])
    return _save(folder, fields, {**tensors, **more})


def make_eagle3(folder: Path, policy: Path, **more: Tensor) -> Path:
    """Saves an EAGLE-3 head, whose hidden state is the sum of the last one and what its attention adds."""
    (alone, key), (before, _) = _attending(0), _attending(1)
    fc = torch.zeros(_HIDDEN, 3 * _HIDDEN)
    fc[:_HALF, :_HALF] = torch.eye(_HALF)  # of the embedding
    fc[_HALF:, _HIDDEN + _HALF : 2 * _HIDDEN] = torch.eye(_HALF)  # of the first layer
    value = torch.zeros(_HIDDEN, 2 * _HIDDEN)
    for half in (slice(0, _HALF), slice(_HALF, _HIDDEN)):
        value[half, :_HALF] = torch.eye(_HALF) / math.sqrt(2)
        value[half, _HIDDEN : _HIDDEN + _HALF] = -torch.eye(_HALF)
    queries = torch.cat([alone.repeat(2), before.repeat(2)])
    tensors = {
        "fc.weight": fc,
        "norm.weight": torch.ones(_HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(_HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(_HIDDEN),
        **_attention("midlayer.", queries, key.repeat(4), value, torch.eye(_HIDDEN)),
    }
    own = {"num_key_value_heads": 4, "architectures": ["LlamaForCausalLMEagle3"]}
    fields = _fields(policy, **own, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    if "d2t" in more:
        fields["draft_vocab_size"] = len(more["d2t"])
    return _save(folder, fields, {**tensors, **more})


def make_mtp(folder: Path, kind: str, seed: int, **changes: Any) -> Path:
    """Saves a model of ``kind``, whose next token depends on the last one alone, with a multi-token-prediction layer
    that knows it: a copy of the last layer, like which it adds nothing to its input."""
    make_model(folder, kind, seed, num_nextn_predict_layers=1, **changes)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    size = tensors["model.norm.weight"].shape[0]
    head = {name.replace("layers.1.", "layers.2."): own for name, own in tensors.items() if "layers.1." in name}
    head |= {f"model.layers.2.{name}.weight": torch.ones(size) for name in ("enorm", "hnorm")}
    head["model.layers.2.eh_proj.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    head["model.layers.2.shared_head.norm.weight"] = tensors["model.norm.weight"]
    both = {name: tensor.clone() for name, tensor in {**tensors, **head}.items()}
    save_file(both, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_random_eagle(folder: Path, policy: Path) -> Path:
    """Saves an EAGLE head of any small policy with random weights."""
    config = json.loads((policy / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own = {"num_key_value_heads": config["num_key_value_heads"], "head_dim": size}
    fields = _fields(policy, **own, architectures=["LlamaForCausalLM"], attention_bias=False)
    _save(folder, fields, {})
    torch.manual_seed(0)
    shapes = read_head(folder, "eagle").tensors
    tensors = {
        name: torch.ones(shape) if "norm" in name else 0.1 * torch.randn(shape) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def _embedding(vocab_size: int, generator: torch.Generator) -> Tensor:
    directions = torch.randn(vocab_size, _HALF, generator=generator)
    embedding = torch.zeros(vocab_size, _HIDDEN)
    embedding[:, :_HALF] = _NORM * directions / directions.norm(dim=1, keepdim=True)
    return embedding


def _attending(distance: int) -> tuple[Tensor, Tensor]:
    """Query and key, the same at each position, with which attention is to the position so far back."""
    angles = distance * 10000.0 ** (-torch.arange(_HEAD // 2) * 2 / _HEAD)
    key = torch.cat([torch.ones(_HEAD // 2), torch.zeros(_HEAD // 2)])
    return _FOCUS * torch.cat([angles.cos(), -angles.sin()]), _FOCUS * key


def _first_of_groups() -> Tensor:
    """Output of attention whose two key and value heads become the second half of a hidden state."""
    output = torch.zeros(_HIDDEN, _HIDDEN)
    for group in range(2):
        rows = slice(_HALF + group * _HEAD, _HALF + (group + 1) * _HEAD)
        output[rows, 2 * group * _HEAD : (2 * group + 1) * _HEAD] = torch.eye(_HEAD)
    return output


def _attention(prefix: str, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> dict[str, Tensor]:
    """A layer's tensors, whose MLP adds nothing."""
    own, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return {
        f"{prefix}post_attention_layernorm.weight": torch.ones(_HIDDEN),
        f"{own}q_proj.weight": torch.zeros(len(query), value.shape[1]),
        f"{own}q_proj.bias": query,
        f"{own}k_proj.weight": torch.zeros(len(key), value.shape[1]),
        f"{own}k_proj.bias": key,
        f"{own}v_proj.weight": value,
        f"{own}v_proj.bias": torch.zeros(len(value)),
        f"{own}o_proj.weight": output,
        f"{own}o_proj.bias": torch.zeros(_HIDDEN),
        **{f"{mlp}{name}_proj.weight": torch.zeros(256, _HIDDEN) for name in ("gate", "up")},
        f"{mlp}down_proj.weight": torch.zeros(_HIDDEN, 256),
    }


def _fields(policy: Path, **own: Any) -> dict[str, Any]:
    fields = json.loads((policy / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    head = {"model_type": "llama", "num_hidden_layers": 1, "head_dim": _HEAD, "attention_bias": True}
    return {name: fields[name] for name in kept} | head | {"rms_norm_eps": 1e-6, "rope_theta": 10000.0} | own


def _save(folder: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder

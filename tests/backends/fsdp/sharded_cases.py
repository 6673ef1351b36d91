"""Programs of ranks that load, gather and differentiate sharded transformers models, and the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from rlhpc.core.errors import UserError
from rlhpc.sharding.mesh_sizes import MeshSizes

# Kind of tiny model, and changes of its config. 67 rows of vocabulary and 3 experts divide by no number of ranks: of
# four, one has no expert.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"vocab_size": 67}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "qwen3moe": ("qwen3moe", {"num_experts": 3}),
    "dsv3": ("dsv3", {}),
}
BIAS = "e_score_correction_bias"
_SEQUENCES, _TOKENS, _MICROBATCHES = 8, 12, 2


def write_reference(folders: dict[str, Path], target: Path) -> None:
    """Writes gradients of plain transformers models on one rank, and values and gradients of critics."""
    from transformers import AutoModelForCausalLM

    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        tokens = _sequences(0, _SEQUENCES)
        _policy_loss(model.lm_head(model.model(input_ids=tokens).last_hidden_state), tokens).backward()
        found = {key: parameter.grad for key, parameter in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        score = score_weight(model.config.hidden_size).requires_grad_()
        values = torch.nn.functional.linear(model.model(input_ids=tokens).last_hidden_state, score)
        _value_loss(values).backward()
        found |= {f"critic.{key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
        found |= {"critic.score.weight": score.grad, "values": values.detach()}
        save_file({key: tensor.contiguous().clone() for key, tensor in found.items()}, target / name)


def layout_facts(folders: dict[str, Path], reference: Path, sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """What a rank finds for each model."""
    return {name: _facts(folder, reference / name, sizes) for name, folder in folders.items()}


def _facts(folder: Path, reference: Path, sizes: dict[str, int]) -> dict[str, Any]:
    files, expected = load_file(folder / "model.safetensors"), load_file(reference)
    model, weights, read = build(folder, sizes)
    whole, shards = dict(weights.full_tensors()), weights.shards
    parameters = dict(model.module.named_parameters())
    facts = {
        "names": sorted(whole),
        "wrong_tensors": [name for name, tensor in whole.items() if not _same(tensor, files[name])],
        "wrong_views": [s for s in shards if not _same(weights.view(s), files[s.tensor.name][s.box.slices])],
        "shards": shards,
        "replicated": {s.tensor.name for s in shards if s.local_name not in parameters},
        "read": read,
        "allocated": sum(p.to_local().untyped_storage().nbytes() for p in parameters.values()),
        "reduce": _policy_error(model, expected),
    }
    kept, kept_weights, _ = build(folder, sizes, load=False, accumulation="keep", reshard_after_forward=False)
    kept_weights.take(weights.full_tensors())
    return {**facts, "keep": _policy_error(kept, expected), "critic": _critic_errors(folder, sizes, expected)}


def build(folder: Path, sizes: dict[str, int], *, load: bool = True, **options: Any) -> tuple[Any, Any, Any]:
    """A model on this rank, its weights, and what was read of the folder."""
    from transformers import AutoConfig

    from rlhpc.backends.fsdp.sharded_model import BuildOptions, ShardedModel, make_meshes
    from rlhpc.backends.fsdp.weight_shards import WeightShards

    meshes = make_meshes(MeshSizes(**sizes), "cpu")
    built_by = BuildOptions(**{"compute_dtype": torch.float32, **options})
    model = ShardedModel(AutoConfig.from_pretrained(folder), meshes, built_by, torch.device("cpu"))
    weights = WeightShards(model)
    return model, weights, weights.load(folder) if load else None


def _critic_errors(folder: Path, sizes: dict[str, int], expected: dict[str, Any]) -> dict[str, float]:
    """Largest value of a critic whose file has no head; then, with a head, relative errors of values and gradients."""
    model, weights, _ = build(folder, sizes, head="value")
    tokens = _sequences(0, _SEQUENCES)
    with torch.no_grad():
        fresh = model(tokens).abs().max()
    # The pass has left the head gathered, and only one rank holds its row: the next pass must gather what is taken.
    weights.take([("score.weight", score_weight(model.head.weight.shape[1]))])
    with torch.no_grad():
        values = (model(tokens) - expected["values"]).abs().max()
    for last, part in _microbatches():
        model.prepare_backward(last=last)
        _value_loss(model(part)).backward()
    return {
        "fresh": float(fresh),
        "values": float(values / expected["values"].abs().max()),
        "gradients": _gradient_error(model, expected, "critic."),
    }


def _policy_error(model: Any, expected: dict[str, Any]) -> float:
    policy_step(model)
    return _gradient_error(model, expected)


def policy_step(model: Any) -> None:
    """Forward and backward passes of one update."""
    for last, tokens in _microbatches():
        model.prepare_backward(last=last)
        _policy_loss(model(tokens), tokens).backward()


def _gradient_error(model: Any, expected: dict[str, Any], prefix: str = "") -> float:
    """Largest difference of a gradient from the reference's, relative to the largest gradient of all."""
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.module.named_parameters()}
    largest = max(expected[prefix + name].abs().max() for name in gradients)
    assert largest > 0.01, "no gradients"
    return max(float((g - expected[prefix + name]).abs().max() / largest) for name, g in gradients.items())


def half_precision_facts(folder: Path, shard_dtype: str) -> dict[str, Any]:
    """What a rank finds after a pass in bfloat16 without gradient."""
    from transformers import AutoModelForCausalLM

    held, half, tokens = getattr(torch, shard_dtype), torch.bfloat16, _sequences(0, 2)
    files = load_file(folder / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=half, attn_implementation="eager")
    model, weights, _ = build(folder, {"dp_shard": 2}, shard_dtype=held, compute_dtype=half, attention="eager")
    with torch.no_grad():
        expected = plain.lm_head(plain.model(input_ids=tokens).last_hidden_state)
        logits = model(tokens)
    gathered = [name for name, p in model.module.named_parameters() if not isinstance(p, DTensor)]
    whole = dict(weights.full_tensors())
    model.head.forward = lambda hidden, temperature: temperature
    return {
        "argument": str(model(tokens, temperature=torch.tensor([0.7])).dtype),
        "same_logits": _same(logits, expected),
        "gathered": gathered,
        "float32": {name for name, tensor in whole.items() if tensor.dtype is torch.float32},
        "declared": {s.tensor.name for s in weights.shards if s.tensor.float32},
        "wrong": [
            name for name, t in whole.items() if not _same(t, files[name] if BIAS in name else files[name].to(held))
        ],
    }


def error_of(sizes: dict[str, int], folder: Path) -> str:
    """The error of building and loading a model."""
    try:
        build(folder, sizes)
    except UserError as error:
        return str(error)
    return ""


def _same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _sequences(first: int, last: int) -> Any:
    """Tokens [B, T] of some of the sequences."""
    return torch.randint(2, 60, (_SEQUENCES, _TOKENS), generator=torch.Generator().manual_seed(3))[first:last]


def _microbatches() -> list[tuple[bool, Any]]:
    """(whether it is the last, tokens) of this rank's microbatches: each sequence is on one rank."""
    each = _SEQUENCES // dist.get_world_size() // _MICROBATCHES
    first = dist.get_rank() * _MICROBATCHES * each
    return [
        (number == _MICROBATCHES - 1, _sequences(first + number * each, first + (number + 1) * each))
        for number in range(_MICROBATCHES)
    ]


def _policy_loss(logits: Any, tokens: Any) -> Any:
    """A sum over tokens, divided by the number of all sequences."""
    log_probs = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return -log_probs.sum() / _SEQUENCES


def _value_loss(values: Any) -> Any:
    return values.sin().sum() / _SEQUENCES


def score_weight(hidden: int) -> Any:
    """Weight of a value head [1, H]."""
    return torch.randn(1, hidden, generator=torch.Generator().manual_seed(5)) / hidden

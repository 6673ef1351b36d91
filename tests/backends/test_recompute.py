"""Activations computed again: really again, and with the same result."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.parts import gradient_buffers, key_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import batches_of, digest, make_actor, optimizer_section, separate_gradients, train, update

pytestmark = [pytest.mark.ranks, pytest.mark.long]

KINDS = ("qwen3", "qwen3moe", "dsv3")
LAYERS = 4
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attn": {"recompute": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    "experts": {"recompute": "selective", "recompute_modules": ["moe", "shared_experts"]},
    "full": {"recompute": "full"},
    "full, in pairs": {"recompute": "full", "recompute_layers": 2},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By kind and way, from two tensor-parallel ranks with sequence parallelism."""
    folder = tmp_path_factory.mktemp("recompute")
    models = {kind: make_model(folder / kind, kind, num_hidden_layers=LAYERS) for kind in KINDS}
    return run_ranks(_look, 2, models)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "none"])
def test_every_bit_of_losses_gradients_and_weights_is_the_same(found: Any, kind: str, way: str) -> None:
    """Metrics too: a router that runs twice counts once."""
    for what in ("log_probs", "metrics", "gradients", "steps", "weights"):
        assert found[kind][way][what] == found[kind]["none"][what], what


def test_what_is_chosen_runs_twice_and_nothing_else(found: Any) -> None:
    """Calls in one microbatch's forward and backward, per module."""
    dense, experts, deepseek = (found[kind] for kind in KINDS)
    once = {"layer": 1, "attention": 1, "mlp": 1}
    assert dense["none"]["calls"] == once
    assert dense["core_attn"]["calls"] == {**once, "attention": 2}
    assert dense["mlp"]["calls"] == {**once, "mlp": 2}
    assert dense["full"]["calls"] == dense["full, in pairs"]["calls"] == dict.fromkeys(once, 2)
    routed = {"layer": 1, "attention": 1, "router": 1}
    assert experts["none"]["calls"] == routed
    assert experts["core_attn"]["calls"] == {**routed, "attention": 2}
    assert experts["experts"]["calls"] == {**routed, "router": 2}
    assert experts["full"]["calls"] == dict.fromkeys(routed, 2)
    assert deepseek["none"]["calls"] == {**routed, "mlp": 1, "shared": 1}
    assert deepseek["experts"]["calls"] == {**routed, "mlp": 1, "router": 2, "shared": 3}, "in the layer, and by itself"


def test_less_is_kept_for_the_backward_pass(found: Any) -> None:
    """Bytes that autograd keeps between forward and backward."""
    dense, experts = found["qwen3"], found["qwen3moe"]
    for kept, less in (("none", "core_attn"), ("none", "mlp"), ("core_attn", "full"), ("full", "full, in pairs")):
        assert dense[less]["kept"] < dense[kept]["kept"], (kept, less)
    assert experts["experts"]["kept"] < experts["none"]["kept"]


def _look(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {kind: {way: _one(models[kind], keys) for way, keys in WAYS.items()} for kind in KINDS}


def _one(model: Path, keys: dict[str, Any]) -> dict[str, Any]:
    from rlhpc.config.training import MemorySection

    actor = make_actor(model, optimizer_section(), MemorySection(**keys), tp=2)
    log_probs = [stats.log_probs.tolist() for stats in actor.log_probs(batches_of(actor), 1.0)]
    metrics = update(actor).sums
    gradients = [buffer.grad_data.tolist() for buffer in gradient_buffers(actor)]
    steps = train(actor, 2)
    calls, kept = _count(actor)
    return {
        "log_probs": log_probs,
        "metrics": metrics,
        "steps": steps,
        "gradients": gradients,
        "weights": digest(actor),
        "calls": calls,
        "kept": kept,
    }


def _count(actor: Any) -> tuple[dict[str, int], int]:
    """Calls of a module in one microbatch, by what it is, and the most bytes that autograd kept at once."""
    import torch
    from megatron.core.transformer.moe.router import Router
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from rlhpc.backends.megatron.layers import FeedForward

    calls: dict[torch.nn.Module, int] = {}
    kinds: dict[torch.nn.Module, str] = {}
    hooks = []

    def called(module: torch.nn.Module, *_: Any) -> None:
        calls[module] = calls.get(module, 0) + 1

    for name, module in actor.models[0].named_modules():
        kind = next(
            (
                k
                for t, k in ((TransformerLayer, "layer"), (SharedExpertMLP, "shared"), (Router, "router"))
                if isinstance(module, t)
            ),
            "attention" if name.endswith("core_attention") else "mlp" if type(module) is FeedForward else None,
        )
        if kind:
            kinds[module] = kind
            hooks.append(_attending(module, called) if kind == "attention" else module.register_forward_hook(called))
    kept: dict[int, int] = {}
    weights = {param.data_ptr() for model in actor.models for param in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[key_of(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    batches = batches_of(actor)
    separate_gradients(actor)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        actor.train(batches[:1], _measured(kept), 100.0, 1.0, 1e-3)
    for hook in hooks:
        hook.remove()
    found: dict[str, set[int]] = {}
    for module, count in calls.items():
        found.setdefault(kinds[module], set()).add(count)
    assert all(len(counts) == 1 for counts in found.values()), found
    return {kind: counts.pop() for kind, counts in found.items()}, _measured.kept


def _attending(attention: Any, called: Any) -> Any:
    """A hook on the part of an attention that it computes again by itself."""
    attend = attention._attend

    def counted(*arguments: Any, **named: Any) -> Any:
        called(attention)
        return attend(*arguments, **named)

    attention._attend = counted
    return SimpleNamespace(remove=lambda: delattr(attention, "_attend"))


def _measured(kept: dict[int, int]) -> Any:
    """A loss that notes what was kept when the forward pass ended."""
    from rlhpc.api import LossSums

    def loss(stats: Any, batch: Any) -> Any:
        _measured.kept = sum(kept.values())
        total = -(stats.log_probs * batch.loss_weight).sum()
        return LossSums(total, {"loss": total.detach()})

    return loss

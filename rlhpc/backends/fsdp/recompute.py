"""Activation recomputation of transformers' layers by torch's checkpoint: whole layers, or parts of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhpc.config.training import MemorySection
from rlhpc.parallel.activation_offload import ActivationOffload

# Names of a layer's feed-forward part in transformers' models, dense or with experts.
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn")
SHARED_EXPERTS = "shared_experts"
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")


@dataclass(frozen=True)
class Recomputation:
    """Parts that a backward pass computes again: each layer, or parts of it, by the names of
    ``memory.recompute_modules``. ``offload``: the layers' inputs wait in CPU memory."""

    layers: bool = False
    parts: frozenset[str] = frozenset()
    offload: bool = False

    @classmethod
    def of(cls, memory: MemorySection) -> Recomputation:
        """Configured recomputation."""
        selective = frozenset(memory.recompute_modules) if memory.recompute == "selective" else frozenset()
        return cls(memory.recompute == "full", frozenset(map(str, selective)), memory.offload_activations)

    @property
    def any(self) -> bool:
        return self.layers or bool(self.parts)

    @property
    def attention(self) -> bool:
        """True if attention alone is computed again, from queries, keys and values."""
        return "core_attn" in self.parts


def recompute_layer(layer: nn.Module, choice: Recomputation, offload: ActivationOffload | None = None) -> None:
    """Makes the layer, or parts of it, keep their inputs alone; those of whole layers in ``offload``, if given. Weights
    are gathered by the layer as a whole, outside of what is computed again."""
    if choice.layers:
        _checkpoint(layer)
        if offload is not None:
            layer.forward = functools.partial(_saving, offload, layer.forward)
        return
    for module in _parts(layer, choice.parts):
        _checkpoint(module)


def _parts(layer: nn.Module, names: frozenset[str]) -> Iterator[nn.Module]:
    for kind, module in feed_forward_parts(layer):
        if kind in names and not (kind == SHARED_EXPERTS and "moe" in names):
            yield module


def feed_forward_parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a layer that can be recomputed, with their names in ``memory.recompute_modules``. Shared experts are
    in the part with experts."""
    for name, module in layer.named_children():
        if name in _FEED_FORWARD:
            yield "moe" if hasattr(module, "experts") else "mlp", module
            yield from ((SHARED_EXPERTS, child) for own, child in module.named_children() if own in _SHARED)


def _checkpoint(module: nn.Module) -> None:
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


def _saving(offload: ActivationOffload, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    with offload.saving():
        return forward(*inputs, **options)

"""Layers as graphs of torch.compile, one for each kind of layer."""

from __future__ import annotations

from torch import nn

from rlhpc.backends.fsdp.attention_interface import traits_of
from rlhpc.backends.kernels.compiled import CompiledFunction


def compile_layer(layer: nn.Module) -> None:
    """Compiles what a layer computes, but not the hooks around it, which gather its weights. A layer that is not one
    graph runs as it is."""
    for module in layer.modules():
        if hasattr(module, "config"):
            module.packed_traits = traits_of(module)
    layer.forward = CompiledFunction(layer.forward, type(layer).__name__)

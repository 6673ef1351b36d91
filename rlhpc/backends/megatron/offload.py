"""Tensors of Megatron's modules and optimizer that may leave the training device: between phases, and between forward
and backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlhpc.backends.megatron.adamw import AdamW
from rlhpc.backends.megatron.optimizer import inner_optimizers
from rlhpc.config.model_settings import ModelSettings
from rlhpc.parallel.activation_offload import ActivationOffload
from rlhpc.parallel.offload import Kind


def device_tensors(models: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None, kind: Kind) -> list[Tensor]:
    """Tensors of a kind on the training device."""
    params = [param for model in models for param in model.parameters()]
    if kind == "parameters":
        return [param.data for param in params]
    if kind == "gradients":
        return [param.main_grad for param in params if hasattr(param, "main_grad")]
    found = []
    for inner in [] if optimizer is None else inner_optimizers(optimizer):
        on_cpu = inner.on_cpu if isinstance(inner, AdamW) else set()
        for param in (param for group in inner.param_groups for param in group["params"]):
            state = {} if param in on_cpu else inner.state.get(param, {})
            own = [param, *state.values()]
            found += [value for value in own if torch.is_tensor(value) and value.device == param.device]
    return found


def offload_inputs(
    models: Sequence[torch.nn.Module], settings: ModelSettings, device: torch.device
) -> ActivationOffload | None:
    """Offload, if configured, of what the decoders save in a forward pass: with full recomputation, the inputs of
    groups of layers. It ends before the final norm, whose backward pass comes first."""
    if settings.optimizer is None or not settings.memory.offload_activations:
        return None
    offload = ActivationOffload(device)
    for model in models:
        model.decoder.register_forward_pre_hook(lambda *_: offload.begin())
        model.decoder.register_forward_hook(lambda *_: offload.end(), always_call=True)
        if model.decoder.final_layernorm is not None:
            model.decoder.final_layernorm.register_forward_pre_hook(lambda *_: offload.end())
    return offload

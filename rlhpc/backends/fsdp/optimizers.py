"""Builds optimizers over a sharded model's parameters: AdamW, AdamW with 8-bit moments, Muon, or the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rlhpc.backends.fsdp.matrices import Matrix, find_matrices, is_vector
from rlhpc.backends.fsdp.muon import Muon
from rlhpc.backends.fsdp.sharded_model import ShardedModel, local_part
from rlhpc.backends.fsdp.stored import StoredWeight
from rlhpc.backends.fsdp.weight_shards import WeightShards
from rlhpc.backends.kernels.own_optimizer import make_own, section_key
from rlhpc.config.training import OptimizerSection
from rlhpc.core.errors import UserError

Groups = list[dict[str, Any]]


def build_optimizer(section: OptimizerSection, model: ShardedModel, weights: WeightShards) -> torch.optim.Optimizer:
    """The section's optimizer of the parameters that are trained, with state in their shards, zero.

    A user's own has no state before its first step. Raises UserError if it or a package is missing.
    """
    model.reshard()
    trained = {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    stored = _stored(weights, trained)
    if section.function is not None:
        remedy = "store tensors made with torch.zeros_like(param), and numbers"
        return make_own(section, _groups(trained, stored), _is_storable, remedy)
    if section.name == "adamw8bit":
        return _adamw8bit(section, _groups(trained, stored))
    if section.name == "muon":
        return _muon(section, model, trained, stored)
    return _adamw(section, _groups(trained, stored))


def set_rate(optimizer: torch.optim.Optimizer, rate: float, weight_decay: float) -> None:
    """Sets learning rate and weight decay of every group, times its lr_mult and wd_mult (0 for vectors)."""
    for group in optimizer.param_groups:
        own = rate * group.get("lr_mult", 1.0)
        if isinstance(group["lr"], Tensor):  # torchao's optimizers refuse a number
            group["lr"].fill_(own)
        else:
            group["lr"] = own
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's parts of the optimizer's state, by the tensors that own memory: 8-bit moments consist of several."""
    found = []
    for value in (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)):
        local = local_part(value)
        inner = local.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(local) else None
        found += [local] if inner is None else [getattr(local, name) for name in inner]
    return found


def _stored(weights: WeightShards, trained: Iterable[str]) -> dict[str, list[StoredWeight]]:
    """The weights of HuggingFace's files in each parameter."""
    found: dict[str, list[StoredWeight]] = {name: [] for name in trained}
    for weight in weights.weights:
        for name in dict.fromkeys(piece.parameter for piece in weight.pieces):
            if name in found:
                found[name].append(weight)
    return found


def _groups(parameters: Mapping[str, Tensor], stored: Mapping[str, list[StoredWeight]]) -> Groups:
    """Parameter groups with and without weight decay; vectors have none."""
    found = []
    for vectors in (False, True):
        some = [parameter for name, parameter in parameters.items() if is_vector(stored[name]) == vectors]
        found += [{"params": some, "wd_mult": float(not vectors)}] if some else []  # a checkpoint takes no empty group
    return found


def _common(section: OptimizerSection) -> dict[str, Any]:
    return {
        "lr": section.learning_rate,
        "betas": (section.beta1, section.beta2),
        "eps": section.epsilon,
        "weight_decay": section.weight_decay,
    }


def _adamw(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups, **_common(section), fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def _adamw8bit(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"adamw8bit needs the package torchao ({error})",
            where=f"{section_key(section)}.name",
            remedy="pip install 'rlhpc[torchao]', or use adamw",
        ) from None
    optimizer = AdamW8bit(groups, **_common(section))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": optimizer._new_buffer(parameter, signed=True),
                "exp_avg_sq": optimizer._new_buffer(parameter, signed=False),
            }
    return optimizer


def _muon(
    section: OptimizerSection,
    model: ShardedModel,
    trained: Mapping[str, Tensor],
    stored: Mapping[str, list[StoredWeight]],
) -> torch.optim.Optimizer:
    matrices: dict[str, tuple[Matrix, ...]] = find_matrices(model, stored)
    others = _groups({name: parameter for name, parameter in trained.items() if name not in matrices}, stored)
    own = [{"params": [trained[name] for name in matrices], "wd_mult": 1.0, "muon": True}] if matrices else []
    return Muon(
        own + others,
        {trained[name]: some for name, some in matrices.items()},
        model.meshes.copy_group,
        model.device,
        momentum=section.momentum,
        nesterov=section.nesterov,
        ns_steps=section.ns_steps,
        **_common(section),
    )


def _is_storable(state: dict[str, Any], parameter: Tensor) -> bool:
    """True if the state of a parameter is sharded as it is, or a number: a checkpoint takes any other tensor for one
    that is equal on all ranks."""
    return all(
        (isinstance(value, DTensor) and value.shape == parameter.shape and value.placements == parameter.placements)
        or (torch.is_tensor(value) and value.dim() == 0)
        or isinstance(value, int | float)
        for value in state.values()
    )

"""Optimizers that back ends share: a user's own, named by import path, and one update by AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlhpc.config.schema import SFTOptimizerSection
from rlhpc.config.training import CriticOptimizerSection, OptimizerSection
from rlhpc.core.errors import UserError
from rlhpc.core.imports import import_attribute

_KEYS = {SFTOptimizerSection: "sft", CriticOptimizerSection: "critic"}
# What a checkpoint can contain of a parameter's state: returns whether it can, for the state and its parameter.
Storable = Callable[[dict[str, Any], Tensor], bool]


def section_key(section: OptimizerSection) -> str:
    """The section's place in the configuration."""
    return f"{_KEYS.get(type(section), 'actor')}.optimizer"


def make_own(
    section: OptimizerSection, params: list[dict[str, Any]], storable: Storable, remedy: str
) -> torch.optim.Optimizer:
    """The user's optimizer; its state is checked after the first step, and ``remedy`` says what it may be."""
    where = f"{section_key(section)}.function"
    function = import_attribute(section.function, where)
    try:
        optimizer = function(params, **section.arguments)
    except TypeError as error:
        raise UserError(
            f"{section.function} does not accept parameter groups and {sorted(section.arguments)} ({error})",
            where=where,
            remedy="match its parameters and optimizer.arguments",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"{section.function} returned a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            where=where,
            remedy="return a torch.optim.Optimizer",
        )

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        hook.remove()
        for param, state in optimizer.state.items():
            if not storable(state, param):
                raise UserError(
                    f"{section.function} stores {sorted(state)} for a parameter, which a checkpoint cannot contain",
                    where=where,
                    remedy=remedy,
                )

    hook = optimizer.register_step_post_hook(check)
    return optimizer


def update_adamw(
    group: dict[str, Any],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
) -> None:
    """Makes one update of weights on one device by torch's fused kernel, with the options of a parameter group whose
    ``step`` counts it already."""
    # The kernel increments the counts, and needs one tensor for each parameter.
    before = torch.full((len(weights),), float(group["step"] - 1), device=weights[0].device).unbind()
    adamw(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(before),
        foreach=False,
        fused=True,
        capturable=False,
        differentiable=False,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )

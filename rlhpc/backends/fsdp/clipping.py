"""Norm and clipping of reduced gradients, of which each rank holds a shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.backends.fsdp.sharded_model import ShardedModel, local_part

_EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_ and Megatron (clip_grads.py)


def sharded_gradients(model: ShardedModel) -> list[Tensor]:
    """This rank's parts of all gradients, without empty ones."""
    found = [local_part(p.grad) for p in model.module.parameters() if p.grad is not None]
    return [gradient for gradient in found if gradient.numel()]


@torch.no_grad()
def grad_norm(model: ShardedModel) -> float:
    """Euclidean norm of the whole gradient, equal on every rank. Collective over the ranks of a copy."""
    gradients = sharded_gradients(model)
    squares = torch.zeros((), device=model.device)
    if gradients:
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        squares = torch.stack(norms).square().sum().to(model.device)
    dist.all_reduce(squares, group=model.meshes.copy_group)
    return float(squares.sqrt())


@torch.no_grad()
def clip_gradients(model: ShardedModel, norm: float, largest: float) -> None:
    """Scales the gradients down to a norm of at most ``largest``; ``norm``: the present one."""
    factor = largest / (norm + _EPSILON)
    gradients = sharded_gradients(model)
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)

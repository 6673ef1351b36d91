"""Log-probs and entropy from logits whose vocabulary is cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from rlhpc.api import TokenStats


def token_stats(
    logits: Float[Tensor, "N V"], targets: Int64[Tensor, " N"], group: dist.ProcessGroup, temperature: float
) -> TokenStats:
    """Natural-log probability of each target and entropy of its distribution at logits / temperature.

    ``logits`` are this rank's part of the vocabulary, parts in rank order. Differentiable.
    """
    log_probs, entropy = _VocabParallelStats.apply(logits, targets, group, 1.0 / temperature)
    return TokenStats(log_probs, entropy)


class _VocabParallelStats(torch.autograd.Function):
    """Two all-reduces forward (maximum [N], sums [N, 3]), none backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup, inverse_temperature: float
    ) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
        x = logits.float() * inverse_temperature
        first = group.rank() * x.size(-1)
        maximum = x.amax(-1)
        if group.size() > 1:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        x = x - maximum[:, None]
        here = (targets >= first) & (targets < first + x.size(-1))
        column = (targets - first).clamp(0, x.size(-1) - 1)
        picked = torch.where(here, x.gather(-1, column[:, None])[:, 0], 0.0)
        exponentials = x.exp()
        sums = torch.stack([exponentials.sum(-1), (exponentials * x).sum(-1), picked], dim=-1)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, picked = sums.unbind(-1)
        log_total, mean = total.log(), weighted / total
        ctx.save_for_backward(x, log_total, column, here, mean)
        ctx.set_materialize_grads(False)
        ctx.inverse_temperature, ctx.dtype = inverse_temperature, logits.dtype
        return picked - log_total, log_total - mean

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        x, log_total, column, here, mean = ctx.saved_tensors
        # d log p(target) / dx_j = [j = target] - p_j;  d entropy / dx_j = -p_j (x_j - E[x])
        grad = (x - log_total[:, None]).exp_()
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_total)
        if grad_entropy is None:
            grad *= -grad_log_probs[:, None]
        else:
            grad *= -(grad_log_probs[:, None] + grad_entropy[:, None] * (x - mean[:, None]))
        grad.scatter_add_(-1, column[:, None], (grad_log_probs * here)[:, None])
        return (grad * ctx.inverse_temperature).to(ctx.dtype), None, None, None

"""The former way of log-probs and entropy, from whole logits: the peer of ``bench.head``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 19
_CHUNK_ELEMENTS_GPU = 1 << 26


def whole_logits_stats(logits: Tensor, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of all rows; ``logits`` are this rank's columns."""
    return _WholeLogits.apply(logits, targets, vocabulary)


class _WholeLogits(torch.autograd.Function):
    """Two all-reduces forward (maximum [N], sums [N, 3]), none backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        group, inverse_temperature = dist.group.WORLD, 1.0
        rows, first = torch.arange(len(targets), device=logits.device), group.rank() * logits.size(-1)
        columns = min(logits.size(-1), vocabulary - first)
        column = targets - first
        ctx.shape, logits = logits.shape, logits[:, :columns]
        here = (column >= 0) & (column < logits.size(-1))
        column = column.clamp(0, logits.size(-1) - 1)
        picked = logits[rows, column].float() * inverse_temperature
        maximum, total, weighted = _softmax_sums(logits, rows, inverse_temperature)
        if group.size() > 1:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            shift = local_maximum - maximum
            weighted, total = shift.exp() * (weighted + shift * total), shift.exp() * total
            sums = torch.stack([total, weighted, torch.where(here, picked, 0.0)], dim=-1)
            dist.all_reduce(sums, group=group)
            total, weighted, picked = sums.unbind(-1)
        log_total, mean = maximum + total.log(), maximum + weighted / total
        ctx.save_for_backward(logits, rows, column, here, log_total, mean)
        ctx.inverse_temperature = inverse_temperature
        ctx.set_materialize_grads(False)
        return picked - log_total, log_total - mean

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        logits, rows, column, here, log_total, mean = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_total)
        grad = logits.new_zeros(ctx.shape)
        for part in _chunks(rows, logits):
            # d log p(target) / dx_j = [j = target] - p_j;  d entropy / dx_j = -p_j (x_j - E[x])
            x = logits[rows[part]].float() * ctx.inverse_temperature
            factor = grad_log_probs[part, None]
            if grad_entropy is not None:
                factor = factor + grad_entropy[part, None] * (x - mean[part, None])
            x = x.sub_(log_total[part, None]).exp_().mul_(factor * -ctx.inverse_temperature)
            x.scatter_add_(
                -1, column[part, None], (grad_log_probs[part] * here[part] * ctx.inverse_temperature)[:, None]
            )
            grad[rows[part], : logits.size(-1)] = x.to(grad.dtype)
        return grad, None, None


def _softmax_sums(logits: Tensor, rows: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum m, sum of exp(x - m) and sum of exp(x - m) (x - m) of each row of x = logits / temperature."""
    results = [logits.new_empty(len(rows), dtype=torch.float32) for _ in range(3)]
    maximum, total, weighted = results
    for part in _chunks(rows, logits):
        x = logits[rows[part]].float() * inverse_temperature
        maximum[part] = x.amax(-1)
        x.sub_(maximum[part, None])
        exponentials = x.exp()
        total[part] = exponentials.sum(-1)
        weighted[part] = exponentials.mul_(x).sum(-1)
    return maximum, total, weighted


def _chunks(rows: Tensor, logits: Tensor) -> list[slice]:
    elements = _CHUNK_ELEMENTS_GPU if logits.is_cuda else _CHUNK_ELEMENTS
    step = max(1, elements // logits.size(-1))
    return [slice(start, start + step) for start in range(0, len(rows), step)]

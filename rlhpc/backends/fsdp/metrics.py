"""Reduction of a loss's metrics over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.backends.fsdp.mesh import Meshes

_MAX = "max/"  # metrics with this prefix are combined by maximum, all others by sum


def reduce_metrics(metrics: Sequence[dict[str, Tensor]], meshes: Meshes, device: torch.device) -> dict[str, float]:
    """Sums, or maxima of metrics named so, over microbatches and ranks with batches of their own. Collective."""
    names = sorted({name for sums in metrics for name in sums})
    reduced: dict[str, float] = {}
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        is_max = operation == dist.ReduceOp.MAX
        selected = [name for name in names if name.startswith(_MAX) == is_max]
        if not selected:
            continue
        combine = max if is_max else sum
        values = [combine(float(m[name]) for m in metrics if name in m) for name in selected]
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        if not is_max and meshes.cp.get_local_rank():
            tensor.zero_()  # ranks that share sequences have the same sums
        dist.all_reduce(tensor, op=operation)
        reduced.update(zip(selected, tensor.tolist(), strict=True))
    return reduced

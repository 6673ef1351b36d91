"""Parts of ``TrainBackend`` that both back ends share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.config.training import OptimizerSection
from rlhpc.parallel.offload import KINDS, Offloader
from rlhpc.sharding.shards import Shard

_MAX = "max/"  # metrics with this prefix are combined by maximum, all others by sum


class SharedBackend:
    """Base of back ends whose tensors an ``Offloader`` moves. ``weights``: this rank's shards of the model."""

    weights: Any
    read_seconds = 0.0
    _offload: Offloader

    def shards(self) -> Sequence[Shard]:
        """See ``TrainBackend``."""
        return self.weights.shards

    def take_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``TrainBackend``."""
        self._offload.restore("parameters")
        self.weights.take(tensors)
        self.reset_optimizer()

    def reset_optimizer(self, section: OptimizerSection | None = None) -> None:
        """See ``TrainBackend``."""
        raise NotImplementedError

    def view(self, shard: Shard) -> Tensor:
        """See ``TrainBackend``. In the dtype of the shards."""
        self._offload.restore("parameters")
        return self.weights.view(shard)

    def offload(self, *, keep_parameters: bool = False) -> None:
        """See ``TrainBackend``."""
        self._offload.release(*(kind for kind in KINDS if not (keep_parameters and kind == "parameters")))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.read_seconds += time.perf_counter() - began


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """True if all elements are finite on every rank. Collective."""
    # Minimum and maximum need no memory, unlike a mask of every weight, and are not finite if any weight is not.
    held = [tensor.detach() for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    finite = torch.ones((), dtype=torch.int, device=device)
    if held:
        extremes = [torch.stack(torch.aminmax(tensor)) for tensor in held]
        finite = torch.stack([torch.isfinite(pair).all() for pair in extremes]).all().int().to(device)
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)


def reduce_metrics(
    metrics: Sequence[dict[str, Tensor]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    repeats: bool = False,
) -> dict[str, float]:
    """Sums, or maxima of metrics named so, over microbatches and the ranks of a group. ``repeats``: another rank of it
    has the same sums, and counts."""
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
        if repeats and not is_max:
            tensor.zero_()
        dist.all_reduce(tensor, op=operation, group=group)
        reduced.update(zip(selected, tensor.tolist(), strict=True))
    return reduced

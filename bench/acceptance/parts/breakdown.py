"""Device time by kernel, or by operator on a CPU, from PyTorch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# A kernel belongs to the first kind with a matching word. Experts' products have their own kernels.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("flash", "fmha", "attention", "varlen")),
    ("expert products", ("grouped", "group_mm")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "aten::mm", "aten::addmm", "_linear_pointwise")),
    ("optimizer", ("adam",)),
    ("norms", ("norm",)),
    ("copies", ("memcpy", "memset", "copy", "fill", "aten::cat", "aten::to")),
    ("indexing and sorting", ("index", "gather", "scatter", "sort", "topk", "cumsum", "scan", "embedding")),
    ("reductions", ("reduce", "softmax", "aten::sum", "aten::amax")),
)
_REST = "element-wise and others"


@dataclass(frozen=True)
class Kernel:
    """Total over all calls of one kernel."""

    name: str
    seconds: float
    calls: int

    @property
    def kind(self) -> str:
        """What it computes, judging by its name."""
        name = self.name.lower()
        return next((kind for kind, words in _KINDS if any(word in name for word in words)), _REST)


def kernels(action: Callable[[], Any], *, on_gpu: bool) -> list[Kernel]:
    """Kernels of one call of ``action``, in descending time; empty if the profiler records none.

    Without annotated ranges, such as those of torch.compile: the profiler lists them in addition to their kernels.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as measured:
        action()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = "CUDA" if on_gpu else "CPU"
    found = [
        Kernel(event.key, _microseconds(event, on_gpu=on_gpu) / 1e6, event.count)
        for event in measured.key_averages()
        if event.device_type.name == wanted and not event.is_user_annotation
    ]
    return sorted((kernel for kernel in found if kernel.seconds > 0), key=lambda kernel: -kernel.seconds)


def by_kind(found: Sequence[Kernel]) -> dict[str, float]:
    """Seconds of each kind of kernel, in descending order."""
    sums: defaultdict[str, float] = defaultdict(float)
    for kernel in found:
        sums[kernel.kind] += kernel.seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _microseconds(event: Any, *, on_gpu: bool) -> float:
    return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

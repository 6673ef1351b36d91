"""Time, memory and kernels of the GPU, or of the CPU if there is none."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

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


def wait() -> None:
    """Wait for the device to finish its work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of a call, including the device work that it starts."""
    wait()
    began = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - began


def median_seconds(action: Callable[[], Any], rounds: int, warm_up: int = 0) -> float:
    """Median over ``rounds`` calls, after ``warm_up`` untimed ones."""
    for _ in range(warm_up):
        action()
    return statistics.median(seconds(action) for _ in range(rounds))


def matrix_peak(*, tiny: bool) -> float:
    """FLOP/s of a square bfloat16 matrix product, 8192 wide on a GPU: the machine's practical peak."""
    import torch

    from rlhpc.parallel.compat import device

    width, calls = (8192, 20) if device().type == "cuda" and not tiny else (512, 2)
    a, b = (torch.randn(width, width, device=device()).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    taken = median_seconds(lambda: [torch.mm(a, b, out=out) for _ in range(calls)], rounds=5, warm_up=2)
    return 2.0 * width**3 * calls / taken


def copy_bandwidth(*, tiny: bool) -> float:
    """Bytes read and written per second by a large copy within the device."""
    import torch

    from rlhpc.parallel.compat import device

    source = torch.zeros(64 << 20 if tiny else 2 * GIB, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), rounds=10, warm_up=2)


def free_bytes() -> int:
    """Free memory of the GPU, after PyTorch has returned its cache."""
    import torch

    gc.collect()
    wait()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def reset_peak() -> None:
    """Reset PyTorch's peak of memory on a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Peak of PyTorch's tensors on the GPU since it was last reset."""
    import torch

    return int(torch.cuda.max_memory_allocated())


# ---- device time by kernel, or by operator on a CPU


@dataclass(frozen=True)
class Kernel:
    """Total over all calls of one kernel."""

    name: str
    seconds: float
    calls: int

    @property
    def kind(self) -> str:
        """Kind of computation, by its name."""
        name = self.name.lower()
        found = (kind for kind, words in _KINDS if any(word in name for word in words))
        return next(found, "element-wise and others")


def kernels(action: Callable[[], Any], *, on_gpu: bool) -> list[Kernel]:
    """Kernels of one call of ``action``, in descending time; empty if the profiler records none.

    Without annotated ranges, such as those of torch.compile: the profiler lists them in addition to their kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as measured:
        action()
        wait()
    wanted, time = ("CUDA", "self_device_time_total") if on_gpu else ("CPU", "self_cpu_time_total")
    found = [
        Kernel(event.key, float(getattr(event, time)) / 1e6, event.count)
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

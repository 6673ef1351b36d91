"""Timing, peak rates and memory of the GPU, or of the CPU if there is none."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

GIB = 1 << 30


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

    def products() -> None:
        for _ in range(calls):
            torch.mm(a, b, out=out)

    return 2.0 * width**3 * calls / median_seconds(products, rounds=5, warm_up=2)


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


def peak_bytes() -> int:
    """Peak of PyTorch's tensors on the GPU since it was last reset."""
    import torch

    return int(torch.cuda.max_memory_allocated())


def outside_pytorch() -> int:
    """Bytes in use on the GPU that PyTorch's allocator does not hold: context, libraries, and other processes."""
    import torch

    wait()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())

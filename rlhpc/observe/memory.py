"""Memory that this rank uses, current and peak."""

from __future__ import annotations

import os
import resource

import torch

_GIB = 1024**3
_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_in_use() -> dict[str, float]:
    """Memory of this process in GiB, of its GPU if it has one. Peaks are since the process began."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        pages = int(file.read().split()[1])
    found = {
        "memory/cpu_gib": pages * _PAGE / _GIB,
        "memory/cpu_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["memory/device_gib"] = (total - free) / _GIB  # of all that use the device, such as NCCL
        found["memory/device_share"] = 1 - free / total
        found["memory/device_allocated_gib"] = torch.cuda.memory_allocated() / _GIB
        found["memory/device_peak_allocated_gib"] = torch.cuda.max_memory_allocated() / _GIB
        found["memory/device_peak_reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
    return found

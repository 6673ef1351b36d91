"""Pinned CPU memory, which a GPU copies to and from directly, of exactly the requested size.

PyTorch rounds pinned memory up to a power of two (aten/src/ATen/core/CachingHostAllocator.h), in the worst case almost
twice the size. Here each buffer is a mapping of its own, registered with CUDA and unregistered when its last tensor is
freed. Forked processes share the mapping, as drivers require of pinned memory: copy-on-write would move the parent's
pages away from those registered with the GPU. So a forked process sees later writes of its parent; ``private`` copies
what must not change.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref

import torch
from torch import Tensor

from rlhpc.core.errors import UserError

_GIB = 1 << 30
_OFFLOAD_LESS = "offload less (actor.memory.offload, optimizer_offload_fraction), or raise slurm.memory"


class _Mapping(mmap.mmap):
    """Anonymous shared memory, possibly registered with CUDA."""

    address = 0
    registered_by = 0  # process id; 0: not registered

    def register(self, where: str, remedy: str) -> None:
        result = torch.cuda.cudart().cudaHostRegister(self.address, len(self), 0)
        if int(result) != 0:
            raise UserError(
                f"CUDA cannot pin {len(self) / _GIB:.2f} GiB of CPU memory (error {int(result)})",
                where=where,
                remedy=remedy,
            )
        self.registered_by = os.getpid()

    def __del__(self) -> None:
        # A forked process has no CUDA context, and neither has a process at its exit.
        if self.registered_by == os.getpid() and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def allocate(
    nbytes: int, device: torch.device, where: str = "actor.memory.offload", remedy: str = _OFFLOAD_LESS
) -> Tensor:
    """Zeroed bytes, pinned if ``device`` is a GPU. They are freed with the last tensor on them, which must not happen
    while a copy to or from ``device`` is in flight. Raises UserError with ``where`` and ``remedy`` if there are too
    few."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    mapping = _Mapping(-1, nbytes)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    mapping.address = tensor.data_ptr()
    if device.type == "cuda":
        mapping.register(where, remedy)
    _mappings.add(mapping)
    return tensor


def private(tensor: Tensor) -> Tensor:
    """Tensor in CPU memory whose contents a forked process sees unchanged: the tensor itself, or a copy if it is on a
    device, pinned or shared."""
    if tensor.device.type == "cpu" and not (tensor.is_pinned() or tensor.is_shared() or _is_mapped(tensor)):
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=False).copy_(tensor)


def _is_mapped(tensor: Tensor) -> bool:
    start = tensor.untyped_storage().data_ptr()
    return any(mapping.address <= start < mapping.address + len(mapping) for mapping in _mappings)

"""Staging memory: blocks of weights on the way, in CPU memory that a GPU copies from and to directly."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.parallel import pinned_memory
from rlhpc.reshard.packing import get, put, wire_dtype
from rlhpc.reshard.staged.layout import Message, Messages, StagedBlock

_REMEDY = "raise it: weights are staged in CPU memory (placement: separate); or fewer ranks of a node generate"


class StagingMemory:
    """Memory of one version. On a CPU pages are taken when they are first written."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = pinned_memory.allocate(size, device, "slurm.memory", _REMEDY)
        self._dtype = dtype

    def put(self, block: StagedBlock, weights: Tensor) -> None:
        """Writes a block, converted to the dtype that it is sent in."""
        put(self._bytes(block.start, block.size), weights, wire_dtype(block.shard.tensor, self._dtype))

    def get(self, block: StagedBlock) -> Tensor:
        """The block."""
        dtype = wire_dtype(block.shard.tensor, self._dtype)
        return get(self._bytes(block.start, block.size), block.shard.box.shape, dtype)

    def place(self, message: Message) -> Tensor:
        """Bytes of a message that is stored in one piece."""
        assert message.start is not None, "its parts must be packed"
        return self._bytes(message.start, message.size)

    def packed(self, message: Message, buffer: Tensor) -> Tensor:
        """The bytes of a message: those stored, or packed into ``buffer``, which is as large."""
        if message.start is not None:
            return self.place(message)
        start = 0
        for part in message.parts:
            shard = part.block.shard
            inside = tuple(
                slice(a - b, c - b) for a, b, c in zip(part.box.start, shard.box.start, part.box.stop, strict=True)
            )
            block, dtype = self.get(part.block), wire_dtype(shard.tensor, self._dtype)
            put(buffer[start : start + part.size], block[inside], dtype)
            start += part.size
        return buffer

    def _bytes(self, start: int, size: int) -> Tensor:
        return self._memory[start : start + size]


def buffer_bytes(messages: Messages, *, at_once: bool) -> int:
    """Bytes to pack the messages of a bucket: all ``at_once``, or one after another."""
    sizes = ([message.size for message in bucket if message.start is None] for bucket in messages)
    return max((sum(found) if at_once else max(found) for found in sizes if found), default=0)

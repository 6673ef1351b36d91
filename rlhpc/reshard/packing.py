"""Blocks of tensors as bytes of a buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.sharding.shards import TensorSpec


def wire_dtype(tensor: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """Dtype that a tensor is sent in; ``dtype`` is the model's."""
    return torch.float32 if tensor.float32 else dtype


def put(place: Tensor, block: Tensor, dtype: torch.dtype) -> None:
    """Writes a block into bytes, which may be unaligned where float32 and bfloat16 tensors share a buffer."""
    if place.storage_offset() % dtype.itemsize == 0:
        place.view(dtype).view(block.shape).copy_(block)
    else:
        place.copy_(block.to(dtype).contiguous().view(-1).view(torch.uint8))


def get(place: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The block stored in those bytes: a view of them, or a copy where they are unaligned."""
    if place.storage_offset() % dtype.itemsize:
        place = place.clone()
    return place.view(dtype).view(shape)

"""Reads blocks of HuggingFace's tensors from a torch_dist checkpoint, each rank its own bytes, as from safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.checkpoint.formats.arrays import NUMPY, Array, close_files
from rlhpc.checkpoint.formats.megatron_folder import checkpoint_folder
from rlhpc.checkpoint.formats.torch_chunks import ChunkReader, relative
from rlhpc.checkpoint.formats.torch_dist import places_of
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index, saved_parameters
from rlhpc.models import ModelShape
from rlhpc.sharding.shards import Box

_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TorchDistFolder:
    """Context manager to read tensors of a checkpoint by name and slice. Objects beside tensors are never read."""

    def __init__(self, model: Path, shape: ModelShape) -> None:
        folder = checkpoint_folder(model)
        self._tensors = read_index(folder).tensors
        self._places = places_of(saved_parameters(self._tensors, shape, folder, model))
        self._into = ChunkReader(folder, self._tensors).into

    def __enter__(self) -> TorchDistFolder:
        return self

    def __exit__(self, *_: Any) -> None:
        close_files()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read_into(self, out: Tensor, name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> None:
        """Reads one block of tensor ``name`` of ``shape`` into ``out``.

        Without a copy in between, if ``out`` is in CPU memory and of the file's type.
        """
        box = Box(tuple(part.start for part in slices), tuple(part.stop for part in slices))
        dtype = self._tensors[self._places[name][0][0].key].dtype
        directly = out.device.type == "cpu" and out.dtype is _TORCH[dtype]
        read = out if directly else torch.empty(box.shape, dtype=_TORCH[dtype])
        self._fill(_array(read), name, box, dtype)
        if not directly:
            out.copy_(read)

    def _fill(self, out: Array, name: str, box: Box, dtype: str) -> None:
        for parameter, shard in self._places[name]:
            met = shard.box.meet(box)
            if met is not None:
                inside = parameter.in_key(shard.part(met).local_box)
                lead = (None,) * (len(inside.start) - len(box.start))
                self._into(out[relative(met, box)][lead], parameter.key, inside, dtype)


def _array(tensor: Tensor) -> Array:
    """The tensor's memory as elements that numpy knows."""
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(NUMPY["BF16"])
    return tensor.detach().numpy()

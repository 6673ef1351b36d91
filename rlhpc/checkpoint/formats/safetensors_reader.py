"""Reads blocks of HuggingFace's tensors from safetensors or a torch_dist checkpoint, without reading whole files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.checkpoint.formats.arrays import NUMPY, Array, close_files
from rlhpc.checkpoint.formats.megatron_folder import checkpoint_folder
from rlhpc.checkpoint.formats.safetensors_headers import INDEX, read_weight_map
from rlhpc.checkpoint.formats.torch_chunks import ChunkReader, relative
from rlhpc.checkpoint.formats.torch_dist import places_of
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index, saved_parameters
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.models import ModelShape
from rlhpc.sharding.shards import Box

_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """Context manager to read tensors of a folder by name and slice; opens files at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of = self._index()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        """One block of tensor ``name``, which must have ``shape`` in the file."""
        if name not in self._file_of:
            raise UserError(
                f"tensor {name!r} is missing",
                where=str(self._folder),
                remedy=did_you_mean(name, self._file_of) + " (config.json and weights must belong together)",
            )
        piece = self._file(self._file_of[name]).get_slice(name)
        found = tuple(piece.get_shape())
        if found != shape:
            raise UserError(
                f"tensor {name!r} has shape {found}, config.json requires {shape}",
                where=str(self._folder / self._file_of[name]),
                remedy="use the config.json that belongs to these weights",
            )
        return piece[slices]

    def read_into(self, out: Tensor, name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> None:
        """Copies one block of tensor ``name``, which must have ``shape`` in the file, into ``out``."""
        out.copy_(self.read(name, shape, slices))

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def whole(self, name: str) -> Tensor:
        """A tensor's value."""
        return self._file(self._file_of[name]).get_tensor(name)

    def _index(self) -> dict[str, str]:
        index = self._folder / INDEX
        if index.is_file():
            return read_weight_map(index)
        file = "model.safetensors"
        if not (self._folder / file).is_file():
            raise UserError(
                f"no model.safetensors and no {INDEX}",
                where=str(self._folder),
                remedy="save the model with save_pretrained (safetensors)",
            )
        return dict.fromkeys(self._file(file).keys(), file)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[name] = safe_open(str(self._folder / name), framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"cannot be read ({error})",
                    where=str(self._folder / name),
                    remedy="the file is damaged or truncated: copy it again",
                ) from None
        return self._open[name]


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

"""Loads what a checkpoint contains besides tensors without running code from it (rlhpc.checkpoint.formats)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhpc.checkpoint.formats.torch_archive import Values, read_bytes, read_file
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON, TORCH_DTYPES, Index, parse_index
from rlhpc.core.errors import UserError


class _TorchValues(Values):
    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, name)

    def tensor(
        self, dtype: str, data: bytes, first: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        kind = self.dtype(dtype)
        flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
        return flat.as_strided(shape, strides, first).clone()  # raises an error for elements outside the storage


class RestrictedLoad:
    """Replacements for the functions that unpickle parts of the checkpoint in ``folder``.

    ``refused``: errors of this rank, which torch raises on all ranks in an exception of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.refused: list[UserError] = []
        self._folder = folder
        self.index = parse_index(folder)
        self._metadata = torch_metadata(self.index)

    def value(self, key: str) -> Any:
        """A value that is not a tensor."""
        file, start, length = self.index.objects[key]
        return read_file(self._folder / file, start, length, _TorchValues())

    def common(self) -> Any:
        """``TorchCommonLoadStrategy.load_common``."""
        return read_file(self._folder / COMMON, values=_TorchValues())

    def metadata(self, reader: Any) -> Metadata:
        """``FileSystemReader.read_metadata``."""
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = reader.load_id
        return self._metadata

    def load_bytes(self, planner: Any, item: Any, value: io.BytesIO) -> None:
        """``DefaultLoadPlanner.load_bytes``."""
        file = planner.metadata.storage_data[item.storage_index].relative_path
        try:
            found = read_bytes(value.getvalue(), self._folder / file, _TorchValues())
        except UserError as error:
            self.refused.append(error)
            raise
        key = item.dest_index.fqn
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[key], found)
        else:
            planner.state_dict[key] = found


def torch_metadata(index: Index) -> Metadata:
    """A checkpoint's index in torch's classes."""
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in index.objects}
    places = {MetadataIndex(key): _StorageInfo(*place) for key, place in index.objects.items()}
    for key, tensor in index.tensors.items():
        dtype = getattr(torch, TORCH_DTYPES.get(tensor.dtype, tensor.dtype))
        chunks = [ChunkStorageMetadata(torch.Size(c.box.start), torch.Size(c.box.shape)) for c in tensor.chunks]
        entries[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(tensor.shape), chunks)
        for chunk, part in zip(tensor.chunks, chunks, strict=True):
            places[MetadataIndex(key, part.offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta())

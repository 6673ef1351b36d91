"""Reads tensors of a torch_dist checkpoint by ranges of bytes, without torch.

Each chunk is a file of torch.save, whose pickle may contain only the few names of a plain tensor; anything else is
refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.arrays import CAST_ELEMENTS, NUMPY, Array, FileArray, cast
from rlhpc.checkpoint.formats.torch_archive import RestrictedUnpickler
from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.checkpoint.formats.torch_dist_metadata import Chunk, SavedTensor
from rlhpc.core.errors import UserError
from rlhpc.sharding.shards import Box

STORAGES = {"F32": "FloatStorage", "BF16": "BFloat16Storage", "F16": "HalfStorage"}
_BLOCK = 1 << 20
_Span = tuple[int, int]
_DTYPE_OF = {storage: dtype for dtype, storage in STORAGES.items()}


class ChunkReader:
    """Reads byte ranges of the chunks of a checkpoint's tensors. ``checked``: compares each chunk with its CRC-32s when
    it is first read."""

    def __init__(self, folder: Path, tensors: Mapping[str, SavedTensor], *, checked: bool = False) -> None:
        self._tensors = tensors
        self._open = lru_cache(maxsize=None)(lambda chunk: open_chunk(folder, chunk, checked=checked))
        self._by_spans = lru_cache(maxsize=64)(self._group)

    def into(self, out: Array, key: str, box: Box, dtype: str) -> None:
        """Reads a block of a tensor into ``out``, of its shape."""
        for rows, columns in self._by_spans(key).items():
            if not _meets(rows, box, 0):
                continue
            for span, chunks in columns.items():
                if not _meets(span, box, 1):
                    continue
                for chunk in chunks:
                    met = chunk.box.meet(box)
                    if met is not None:
                        self._chunk_into(out[relative(met, box)], chunk, _shifted(met, chunk.box.start), dtype, key)

    def _chunk_into(self, out: Array, chunk: Chunk, box: Box, dtype: str, key: str) -> None:
        array: FileArray = self._open(chunk)
        if array.dtype == dtype:
            array.read_into(out, box)
            return
        for part in cut_box(box, CAST_ELEMENTS):
            out[relative(part, box)] = cast(array.read(part), array.dtype, dtype, key)

    def _group(self, key: str) -> dict[_Span, dict[_Span, list[Chunk]]]:
        """Chunks by their ranges of the first two dimensions: stacked layers of experts have thousands."""
        found: dict[_Span, dict[_Span, list[Chunk]]] = {}
        for chunk in self._tensors[key].chunks:
            rows, columns = (_span(chunk.box, dim) for dim in (0, 1))
            found.setdefault(rows, {}).setdefault(columns, []).append(chunk)
        return found


def _span(box: Box, dim: int) -> _Span:
    """Range of a dimension; of one that the box lacks, that of a single element."""
    return (box.start[dim], box.stop[dim]) if dim < len(box.start) else (0, 1)


def _meets(span: _Span, box: Box, dim: int) -> bool:
    start, stop = _span(box, dim)
    return span[0] < stop and span[1] > start


def _shifted(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(
        tuple(a - o for a, o in zip(box.start, origin, strict=True)),
        tuple(b - o for b, o in zip(box.stop, origin, strict=True)),
    )


def relative(box: Box, whole: Box) -> tuple[slice, ...]:
    """Slices of a box in an array that is another, larger box."""
    return _shifted(box, whole.start).slices


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = open(path, "rb"), start, length, 0  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, origin: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[origin]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        wanted = max(0, min(len(buffer), self._length - self._at))
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_chunk(folder: Path, chunk: Chunk, *, checked: bool = False) -> FileArray:
    """Elements of a chunk, which must contain one plain tensor of its box's shape; ``checked``: as its CRC-32s say.

    Raises UserError.
    """
    path = folder / chunk.file
    try:
        with _Part(path, chunk.start, chunk.length) as part, zipfile.ZipFile(part) as archive:
            names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            tensor = _TensorReader(io.BytesIO(_pickle(archive, names)), _TENSOR_NAMES, "a plain tensor").load()
            record = names[f"data/{tensor.storage.key}"]
            part.seek(record.header_offset + 26)
            name, extra = struct.unpack("<HH", part.read(4))
            start = chunk.start + record.header_offset + 30 + name + extra
            if checked:
                _check_records(archive)
    except UserError as error:
        raise UserError(error.message, where=str(path)) from None
    except Exception as error:  # a damaged archive fails in any way
        raise UserError(
            f"the chunk at byte {chunk.start} is damaged ({_reason(error)})",
            where=str(path),
            remedy="copy or save the checkpoint again",
        ) from None
    first = start + tensor.first * NUMPY[tensor.storage.dtype].itemsize
    array = FileArray(path, first, tensor.storage.dtype, tensor.shape)
    _check(array, tensor, chunk, record)
    return array


def check_archive(data: bytes, path: Path) -> None:
    """Compares the records of an archive with their CRC-32s. Raises UserError."""
    if not zipfile.is_zipfile(io.BytesIO(data)):  # a plain pickle
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_records(archive)
    except Exception as error:
        raise UserError(
            f"is damaged ({_reason(error)})", where=str(path), remedy="copy or save the checkpoint again"
        ) from None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, zipfile.BadZipFile) else type(error).__name__


def _check_records(archive: zipfile.ZipFile) -> None:
    """Reads each record that has a CRC-32, which torch.save may leave out: zipfile compares it."""
    for info in archive.infolist():
        if info.CRC:
            with archive.open(info) as record:
                while record.read(_BLOCK):
                    pass


def _pickle(archive: zipfile.ZipFile, names: Mapping[str, zipfile.ZipInfo]) -> bytes:
    record = names["data.pkl"]
    if not record.CRC:
        record.CRC = None  # type: ignore[assignment]  # left out by torch.save: not checked
    return archive.read(record)


def _check(array: FileArray, tensor: _Tensor, chunk: Chunk, record: zipfile.ZipInfo) -> None:
    strides = tuple(prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape)))
    rows_in_order = all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.strides, strides, strict=True))
    end = (tensor.first + prod(tensor.shape)) * NUMPY[array.dtype].itemsize
    within = tensor.first >= 0 and end <= record.file_size
    good = rows_in_order and within and record.compress_type == zipfile.ZIP_STORED
    if not good or tensor.shape != chunk.box.shape:
        raise UserError(
            f"the chunk at byte {chunk.start} contains {list(tensor.shape)} with strides {list(tensor.strides)}, not "
            f"contiguous {list(chunk.box.shape)}",
            where=str(array.path),
        )


@dataclass(frozen=True)
class _StorageReference:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _StorageReference
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorReader(RestrictedUnpickler):
    def persistent_load(self, value: Any) -> _StorageReference:
        _, storage, key, _, _ = value
        return _StorageReference(storage, str(key))


def _rebuild(storage: _StorageReference, first: int, shape: Any, strides: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, first, tuple(shape), tuple(strides))


_TENSOR_NAMES = {
    **{("torch", storage): dtype for storage, dtype in _DTYPE_OF.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
}

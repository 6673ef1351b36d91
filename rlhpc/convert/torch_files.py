"""Writes and opens files of torch.save without torch: zip archives with one record for the elements.

A pickle that is read may contain only the few names of a plain tensor; anything else is refused. Pickles that are
written name torch's functions without importing them.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.torch_archive import RestrictedUnpickler
from rlhpc.checkpoint.formats.torch_dist_metadata import TORCH_DTYPES, Chunk
from rlhpc.convert.arrays import NUMPY, FileArray
from rlhpc.core.errors import UserError

_STORAGES = {"F32": "FloatStorage", "BF16": "BFloat16Storage", "F16": "HalfStorage"}
_DTYPE_OF = {storage: dtype for dtype, storage in _STORAGES.items()}
_METADATA = "torch.distributed.checkpoint.metadata"
_LOCAL, _CENTRAL, _END = "<IHHHHHIIIHH", "<IHHHHHHIIIHHHHHII", "<IHHHHIIH"
_ALIGN = 64  # of the record, for mappings of the file


# --- pickles with names that are not imported


@dataclass(frozen=True)
class PickledName:
    module: str
    name: str


@dataclass(frozen=True)
class PickledCall:
    """Result of ``function(*arguments)`` when the pickle is read."""

    function: PickledName
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Storage:
    dtype: str
    elements: int


class _Pickler(pickle._Pickler):
    dispatch = pickle._Pickler.dispatch.copy()

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", PickledName("torch", _STORAGES[value.dtype]), "0", "cpu", value.elements)
        return None

    def save_name(self, value: PickledName) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())

    def save_call(self, value: PickledCall) -> None:
        self.save(value.function)
        self.save(value.arguments)
        self.write(pickle.REDUCE)

    dispatch[PickledName] = save_name
    dispatch[PickledCall] = save_call


def pickled(value: Any) -> bytes:
    """Pickle of plain values, names and calls, in torch.save's protocol."""
    file = io.BytesIO()
    _Pickler(file, 2).dump(value)
    return file.getvalue()


@lru_cache(maxsize=1024)
def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    storage = _Storage(dtype, prod(shape))
    empty = PickledCall(PickledName("collections", "OrderedDict"), ())
    return pickled(
        PickledCall(PickledName("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, strides, False, empty))
    )


# --- archives


def wrap(dtype: str, shape: tuple[int, ...], checksum: int) -> tuple[bytes, bytes]:
    """Bytes before and after the elements of a tensor in its file; ``checksum`` is the CRC-32 of the elements."""
    size = prod(shape) * NUMPY[dtype].itemsize
    before = [("data.pkl", _tensor_pickle(dtype, shape)), ("byteorder", b"little")]
    return _archive(before, ("data/0", size, checksum))


def archive(value: Any) -> bytes:
    """File of torch.save for a value without tensors."""
    head, tail = _archive([("data.pkl", pickled(value)), ("byteorder", b"little")], None)
    return head + tail


def _archive(before: list[tuple[str, bytes]], record: tuple[str, int, int] | None) -> tuple[bytes, bytes]:
    """Uncompressed archive: its bytes before and after those of the record."""
    head, central, at = bytearray(), bytearray(), 0

    def enter(name: str, size: int, crc: int, *, pad: bool) -> bytes:
        path = f"archive/{name}".encode()
        fill = -(at + 30 + len(path) + 4) % _ALIGN if pad else 0
        extra = b"FB" + struct.pack("<H", fill) + b"Z" * fill if pad else b""
        shared = (0, 0x800, 0, 0, 0, crc, size, size, len(path), len(extra))
        central.extend(struct.pack(_CENTRAL, 0x02014B50, 0, *shared[:9], 0, 0, 0, 0, 0, at) + path)
        return struct.pack(_LOCAL, 0x04034B50, *shared) + path + extra

    for name, content in before:
        head += enter(name, len(content), zlib.crc32(content), pad=False) + content
        at = len(head)
    if record is not None:
        head += enter(*record, pad=True)
        at = len(head) + record[1]
    version = b"3\n"
    tail = enter("version", len(version), zlib.crc32(version), pad=False) + version
    at += len(tail)
    count = len(before) + 1 + (record is not None)
    tail += bytes(central) + struct.pack(_END, 0x06054B50, 0, 0, count, count, len(central), at, 0)
    return bytes(head), tail


# --- reading


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


def open_chunk(folder: Path, chunk: Chunk) -> FileArray:
    """Elements of a chunk, which must contain one plain tensor of its box's shape. Raises UserError."""
    path = folder / chunk.file
    try:
        with _Part(path, chunk.start, chunk.length) as part, zipfile.ZipFile(part) as archive:
            names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            tensor = _TensorReader(io.BytesIO(archive.read(names["data.pkl"])), _TENSOR_NAMES, "a plain tensor").load()
            record = names[f"data/{tensor.storage.key}"]
            part.seek(record.header_offset + 26)
            name, extra = struct.unpack("<HH", part.read(4))
            start = chunk.start + record.header_offset + 30 + name + extra
    except UserError as error:
        raise UserError(error.message, where=str(path)) from None
    except Exception as error:  # a damaged archive fails in any way
        raise UserError(
            f"the chunk at byte {chunk.start} is damaged ({type(error).__name__})",
            where=str(path),
            remedy="copy or save the checkpoint again",
        ) from None
    array = FileArray(
        path, start + tensor.first * NUMPY[tensor.storage.dtype].itemsize, tensor.storage.dtype, tensor.shape
    )
    _check(array, tensor, chunk, record)
    return array


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


# --- the index of a checkpoint


def index_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...], list[Chunk]]], objects: Mapping[str, tuple[str, int, int]]
) -> bytes:
    """.metadata of a torch_dist checkpoint, from (dtype, shape, chunks) of each tensor and the places of objects."""

    def size(numbers: tuple[int, ...]) -> PickledCall:
        return PickledCall(PickledName("torch", "Size"), (tuple(numbers),))

    def made(name: str, *arguments: Any) -> PickledCall:
        return PickledCall(PickledName(_METADATA, name), arguments)

    def info(file: str, start: int, length: int) -> PickledCall:
        return PickledCall(
            PickledName("torch.distributed.checkpoint.filesystem", "_StorageInfo"), (file, start, length)
        )

    keys: dict[str, PickledCall] = {}
    places: dict[PickledCall, PickledCall] = {}
    for key, (dtype, shape, chunks) in tensors.items():
        parts = [made("ChunkStorageMetadata", size(chunk.box.start), size(chunk.box.shape)) for chunk in chunks]
        properties = made("TensorProperties", PickledName("torch", TORCH_DTYPES[dtype]))
        keys[key] = made("TensorStorageMetadata", properties, size(shape), parts)
        for chunk in chunks:
            where = info(chunk.file, chunk.start, chunk.length)
            places[made("MetadataIndex", key, size(chunk.box.start))] = where
    for key, where in objects.items():
        keys[key] = made("BytesStorageMetadata")
        places[made("MetadataIndex", key)] = info(*where)
    return pickled(made("Metadata", keys, None, places, made("StorageMeta"), "1.0.0"))

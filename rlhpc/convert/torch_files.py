"""Writes files of torch.save without torch: zip archives with one record for the elements.

Their pickles name torch's functions without importing them.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from rlhpc.checkpoint.formats.arrays import NUMPY
from rlhpc.checkpoint.formats.torch_chunks import STORAGES
from rlhpc.checkpoint.formats.torch_dist_metadata import TORCH_DTYPES, Chunk

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
class PickledObject:
    """An instance of a class with ``state`` as its attributes, which is made without calling the class."""

    kind: PickledName
    state: Mapping[str, Any]


@dataclass(frozen=True)
class _Storage:
    dtype: str
    elements: int


class _Pickler(pickle._Pickler):
    dispatch = pickle._Pickler.dispatch.copy()

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", PickledName("torch", STORAGES[value.dtype]), "0", "cpu", value.elements)
        return None

    def save_name(self, value: PickledName) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())

    def save_call(self, value: PickledCall) -> None:
        self.save(value.function)
        self.save(value.arguments)
        self.write(pickle.REDUCE)

    def save_object(self, value: PickledObject) -> None:
        self.save(value.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(dict(value.state))
        self.write(pickle.BUILD)

    dispatch[PickledName] = save_name
    dispatch[PickledObject] = save_object
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

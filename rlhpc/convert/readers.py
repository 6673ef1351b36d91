"""Reads blocks of a model's tensors from either kind of folder, in any supported type, and checks their bytes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.formats.arrays import (
    CAST_ELEMENTS,
    NUMPY,
    Array,
    CheckedRange,
    FileArray,
    cast,
    close_files,
    hold,
    timed,
    to_float32,
)
from rlhpc.checkpoint.formats.model_files import FP8_BLOCK, RECORD
from rlhpc.checkpoint.formats.safetensors_headers import StoredTensor
from rlhpc.checkpoint.formats.torch_chunks import ChunkReader, relative
from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.convert.plan import NewChunk
from rlhpc.convert.sides import SCALE, HuggingFaceSide, MegatronSide, ShardedSide, Side, read_record
from rlhpc.core.errors import UserError
from rlhpc.sharding.shards import Box

_HELD_BYTES = 64 << 20  # a larger range is read a second time


class RangeChecker:
    """Checks each range once, so that nothing is written from a damaged one."""

    def __init__(self) -> None:
        self._good: set[CheckedRange] = set()
        self._buffer: Array = np.empty(0, np.uint8)

    def check(self, array: FileArray) -> None:
        """Checks the range that contains the array. Raises UserError."""
        span = array.span
        if span is None or span in self._good:
            return
        if self._checksum(span) != span.crc:
            raise UserError(
                f"bytes {span.start} to {span.start + span.length} differ from their CRC-32 on record",
                where=str(span.path),
                remedy=f"copy the file again, or remove {span.record} if another program wrote the weights since"
                if span.record
                else "copy or save the checkpoint again",
            )
        self._good.add(span)

    def _checksum(self, span: CheckedRange) -> int:
        if span.length > _HELD_BYTES:
            return _checksum_by_parts(span)
        if len(self._buffer) < span.length:
            self._buffer = np.empty(span.length, np.uint8)
        data = self._buffer[: span.length]
        FileArray(span.path, span.start, "U8", data.shape).read_bytes(data)
        hold(span, data)
        return zlib.crc32(memoryview(data))


def _checksum_by_parts(span: CheckedRange) -> int:
    checksum, buffer = 0, np.empty(8 << 20, np.uint8)
    for at in range(0, span.length, len(buffer)):
        data = buffer[: min(len(buffer), span.length - at)]
        FileArray(span.path, span.start + at, "U8", data.shape).read_bytes(data)
        checksum = zlib.crc32(memoryview(data), checksum)
    return checksum


def recorded_ranges(record: Mapping[str, Any], folder: Path, name: str) -> dict[tuple[Path, int], CheckedRange]:
    """Ranges in a conversion's record, by file and start. ``name``: the record's file."""
    found = {}
    try:
        for piece in record["items"].values():
            path = folder / piece["file"]
            for start, length, crc in piece["items"]:
                found[path, start] = CheckedRange(path, start, length, crc, name)
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}  # verify reports it
    return found


class HuggingFaceReader:
    """Reads byte ranges of safetensors."""

    def __init__(self, side: HuggingFaceSide, checker: RangeChecker | None) -> None:
        self._side, self._checker = side, checker
        self._spans = recorded_ranges(read_record(side.folder), side.folder, RECORD) if checker else {}

    def tensor(self, name: str, box: Box, dtype: str) -> Array:
        """A block of a HuggingFace tensor."""
        out = np.empty(box.shape, NUMPY[dtype])
        self._into(out, name, box, dtype)
        return out

    def chunk(self, new: NewChunk) -> Array:
        """Contents of a new chunk; rows that pad the vocabulary are zero."""
        out = (np.zeros if new.parameter.pads else np.empty)(new.box.shape, NUMPY[new.dtype])
        for shard, at in new.parameter.within(new.box):
            inside = out[relative(at, new.box)]
            self._into(inside.reshape(shard.box.shape), shard.tensor.name, shard.box, new.dtype)
        return out

    def _into(self, out: Array, name: str, box: Box, dtype: str) -> None:
        stored = self._side.tensors[name]
        array = self._array(stored)
        if stored.dtype == dtype:
            array.read_into(out, box)
            return
        for part in cut_box(box, CAST_ELEMENTS):
            values = array.read(part)
            if stored.dtype == "F8_E4M3":
                with timed("cast"):
                    scaled = to_float32(values, stored.dtype) * self._scales(name, part)
                    out[relative(part, box)] = cast(scaled, "F32", dtype, name)
            else:
                out[relative(part, box)] = cast(values, stored.dtype, dtype, name)

    def _array(self, stored: StoredTensor) -> FileArray:
        array = _array_of(stored)
        if self._checker is not None:
            self._checker.check(replace(array, span=self._spans.get((stored.file, stored.start))))
        return array

    def _scales(self, name: str, box: Box) -> Array:
        """Scale of each element of a block; the tensor has one for each 128 x 128 elements."""
        stored = self._side.scales[name + SCALE]
        array = self._array(stored)
        rows, columns = (np.arange(a, b) // FP8_BLOCK for a, b in zip(box.start, box.stop, strict=True))
        needed = Box((int(rows[0]), int(columns[0])), (int(rows[-1]) + 1, int(columns[-1]) + 1))
        scale = to_float32(array.read(needed), stored.dtype)
        return scale[rows - rows[0]][:, columns - columns[0]]


class MegatronReader:
    """Reads byte ranges of a torch_dist checkpoint."""

    def __init__(self, side: MegatronSide, checker: RangeChecker | None) -> None:
        self._side = side
        self._into = ChunkReader(side.folder, side.tensors, checker and checker.check).into

    def tensor(self, name: str, box: Box, dtype: str) -> Array:
        """A block of a HuggingFace tensor."""
        out = np.empty(box.shape, NUMPY[dtype])
        for parameter, shard in self._side.places[name]:
            met = shard.box.meet(box)
            if met is not None:
                inside = parameter.in_key(shard.part(met).local_box)
                part = out[relative(met, box)]
                self._into(part.reshape(inside.shape), parameter.key, inside, dtype)
        return out

    def chunk(self, new: NewChunk) -> Array:
        """Contents of a new chunk; additional rows that pad the vocabulary are zero."""
        out = np.zeros(new.box.shape, NUMPY[new.dtype])
        saved = self._side.as_written[new.parameter.key, new.parameter.layer]
        key = new.prefix + saved.key
        limits = self._side.tensors[key].shape
        inside = saved.in_key(new.box).meet(Box((0,) * len(limits), limits))
        if inside is not None:
            lead = len(saved.lead)
            part = out[tuple(slice(0, n) for n in inside.shape[lead:])]
            self._into(part.reshape(inside.shape), key, inside, new.dtype)
        return out


class ShardedReader:
    """Reads byte ranges of a checkpoint of the FSDP2 back end."""

    def __init__(self, side: ShardedSide, checker: RangeChecker | None) -> None:
        self._side = side
        self._chunks = ChunkReader(side.folder, side.tensors, checker and checker.check)

    def tensor(self, name: str, box: Box, dtype: str) -> Array:
        """A block of a HuggingFace tensor."""
        out = np.empty(box.shape, NUMPY[dtype])
        for piece in self._side.weights[name].pieces:
            met = piece.box.meet(box)
            if met is not None:
                inside, part = piece.of(met), out[relative(met, box)]
                self._chunks.into(part.reshape(inside.shape), piece.parameter, inside, dtype)
        return out

    def chunk(self, new: NewChunk) -> Array:
        raise AssertionError("converted to HuggingFace folders only")


Reader = HuggingFaceReader | MegatronReader | ShardedReader


def reader_of(side: Side, *, checked: bool = False) -> Reader:
    """Reader of a folder in its current state. ``checked``: compares what is read with CRC-32s on record."""
    close_files()
    checker = RangeChecker() if checked else None
    match side:
        case HuggingFaceSide():
            return HuggingFaceReader(side, checker)
        case MegatronSide():
            return MegatronReader(side, checker)
        case ShardedSide():
            return ShardedReader(side, checker)


def check_tied(side: Side) -> None:
    """Refuses a stored head of a model with tied embeddings, unless it equals the embedding bit by bit: it is left out.

    Raises UserError.
    """
    if not isinstance(side, HuggingFaceSide) or not side.shape.tied_embeddings:
        return
    head = side.left_out.get("lm_head.weight")
    if head is None:
        return
    embedding = _array_of(side.tensors["model.embed_tokens.weight"])
    both = head.shape == embedding.shape and head.dtype == embedding.dtype
    boxes = cut_box(Box((0,) * len(head.shape), head.shape), CAST_ELEMENTS)
    if not both or not all(np.array_equal(_array_of(head).read(box), embedding.read(box)) for box in boxes):
        raise UserError(
            "config.json sets tie_word_embeddings, but 'lm_head.weight' differs from the embedding",
            where=str(head.file),
            remedy="set it to false in config.json to use the head, or remove the tensor",
        )


def _array_of(stored: StoredTensor) -> FileArray:
    return FileArray(stored.file, stored.start, stored.dtype, stored.shape)

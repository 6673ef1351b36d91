"""Reads blocks of a model's tensors from either kind of folder, in any supported type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlhpc.checkpoint.formats.arrays import (
    CAST_ELEMENTS,
    NUMPY,
    Array,
    FileArray,
    cast,
    close_files,
    to_float32,
)
from rlhpc.checkpoint.formats.model_files import FP8_BLOCK
from rlhpc.checkpoint.formats.safetensors_headers import StoredTensor
from rlhpc.checkpoint.formats.torch_chunks import ChunkReader, relative
from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.convert.plan import NewChunk
from rlhpc.convert.sides import SCALE, HuggingFaceSide, MegatronSide, ShardedSide, Side
from rlhpc.core.errors import UserError
from rlhpc.sharding.shards import Box


class HuggingFaceReader:
    """Reads byte ranges of safetensors."""

    def __init__(self, side: HuggingFaceSide) -> None:
        self._side = side

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
        array = _array_of(stored)
        if stored.dtype == dtype:
            array.read_into(out, box)
            return
        for part in cut_box(box, CAST_ELEMENTS):
            values = array.read(part)
            if stored.dtype == "F8_E4M3":
                scaled = to_float32(values, stored.dtype) * self._scales(name, part)
                out[relative(part, box)] = cast(scaled, "F32", dtype, name)
            else:
                out[relative(part, box)] = cast(values, stored.dtype, dtype, name)

    def _scales(self, name: str, box: Box) -> Array:
        """Scale of each element of a block; the tensor has one for each 128 x 128 elements."""
        stored = self._side.scales[name + SCALE]
        array = _array_of(stored)
        rows, columns = (np.arange(a, b) // FP8_BLOCK for a, b in zip(box.start, box.stop, strict=True))
        needed = Box((int(rows[0]), int(columns[0])), (int(rows[-1]) + 1, int(columns[-1]) + 1))
        scale = to_float32(array.read(needed), stored.dtype)
        return scale[rows - rows[0]][:, columns - columns[0]]


class MegatronReader:
    """Reads byte ranges of a torch_dist checkpoint."""

    def __init__(self, side: MegatronSide) -> None:
        self._side = side
        self._into = ChunkReader(side.folder, side.tensors, checked=True).into

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

    def __init__(self, side: ShardedSide) -> None:
        self._side = side
        self._chunks = ChunkReader(side.folder, side.tensors, checked=True)

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


def reader_of(side: Side) -> Reader:
    """Reader of a folder in its current state, which compares chunks with their CRC-32s."""
    close_files()
    kinds: dict[str, Callable[[Any], Reader]]
    kinds = {"hf": HuggingFaceReader, "megatron": MegatronReader, "fsdp": ShardedReader}
    return kinds[side.kind](side)


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

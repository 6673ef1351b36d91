"""Placement of a model's weights: tensors by HuggingFace's names and shapes, and the rank that holds each box of them.

These coordinates are common to Megatron, HuggingFace files and engines: loading, saving and moving weights are one
operation, the intersection of two lists of shards. Ranges of a flattened tensor, as in a distributed optimizer, are
converted to boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from rlhpc.models import ModelDescription, ModelShape, find_family
from rlhpc.models.flops import attention_weights
from rlhpc.models.tables import Cut, Row, Where
from rlhpc.sharding.layout import ParallelLayout


@dataclass(frozen=True)
class TensorSpec:
    """One weight of the model, with HuggingFace's name and shape."""

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    expert: int | None = None
    float32: bool = False  # for any dtype of the model


@dataclass(frozen=True)
class Box:
    """A half-open block of a tensor's coordinates."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """Intersection of both; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


@dataclass(frozen=True)
class Shard:
    """``box`` of ``tensor``, which a rank holds in its parameter ``local_name`` at ``local_start``.

    ``chunk`` is the virtual pipeline stage whose module contains the parameter. A parameter that stacks experts has one
    leading dimension more than the tensor of one expert.
    """

    tensor: TensorSpec
    box: Box
    local_name: str
    local_start: tuple[int, ...]
    chunk: int = 0

    @property
    def local_box(self) -> Box:
        shape = (1,) * (len(self.local_start) - len(self.box.start)) + self.box.shape
        return Box(self.local_start, tuple(a + n for a, n in zip(self.local_start, shape, strict=True)))

    def part(self, box: Box) -> Shard:
        """Shard of a box inside this shard's."""
        lead = len(self.local_start) - len(box.start)
        moved = (at + b - a for at, a, b in zip(self.local_start[lead:], self.box.start, box.start, strict=True))
        return Shard(self.tensor, box, self.local_name, (*self.local_start[:lead], *moved), self.chunk)


@dataclass(frozen=True)
class Place:
    """A tensor, its row in the family's table, and the parameter that contains it, with stage and chunk.

    ``experts``: those of a stack that the rank holds, or the one that the tensor belongs to.
    """

    tensor: TensorSpec
    row: Row
    local_name: str
    stage: int = 0
    chunk: int = 0
    experts: range = range(0)
    local_expert: int = 0


def blocks_of(shards: Iterable[Shard], tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[Shard, Any]]:
    """Each shard with its block of a whole tensor, given by name; tensors without a shard are ignored."""
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.tensor.name, []).append(shard)
    for name, tensor in tensors:
        for shard in by_name.get(name, []):
            yield shard, tensor[shard.box.slices]


def model_tensors(shape: ModelDescription) -> list[TensorSpec]:
    """Every tensor of the model: of a known family in order of layers, of another in the order of its files."""
    if isinstance(shape, ModelShape):
        return [place.tensor for place in tensor_places(shape)]
    return [TensorSpec(tensor.name, tensor.shape, tensor.layer, tensor.expert) for tensor in shape.tensors]


def num_parameters(shape: ModelDescription) -> int:
    """Number of parameters; an estimate for a model of no known family without its files.

    Counts a layer's experts as a stack, because it is called often and they are many.
    """
    if isinstance(shape, ModelShape):
        return sum(prod(place.tensor.shape) for place in tensor_places(shape, stacked=True))
    return sum(tensor.numel for tensor in shape.tensors) or _estimated_parameters(shape)


def _estimated_parameters(shape: ModelDescription) -> int:
    """Parameters with grouped-query or latent attention and SwiGLU of these sizes, without norms and biases."""
    hidden, experts = shape.hidden_size, shape.experts
    found = shape.num_layers * attention_weights(shape) + (2 - shape.tied_embeddings) * shape.vocab_size * hidden
    dense = shape.num_layers
    if experts is not None:
        dense -= len(experts.layers)
        each = experts.num_experts * (3 * experts.ffn_size + 1) + 3 * experts.shared_ffn_size
        found += len(experts.layers) * hidden * each
    return found + dense * 3 * hidden * (shape.ffn_size or 4 * hidden)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of embedding and head in Megatron: the vocabulary, padded to a multiple of tp."""
    return -(-vocab_size // tp) * tp


def megatron_shards(shape: ModelShape, layout: ParallelLayout, rank: int, *, stacked: bool = False) -> list[Shard]:
    """Shards of one training rank, in the order of the model's tensors; ``stacked`` as in ``tensor_places``."""
    coord = layout.coord(rank)
    shards: list[Shard] = []
    for place in tensor_places(shape, layout, coord, stacked=stacked):
        shards += _tensor_shards(shape, place, layout, coord)
    if shape.tied_embeddings and layout.pp > 1 and coord["pp"] == layout.pp - 1:
        # Megatron keeps a second copy of tied embeddings on the last stage.
        first = next(tensor_places(shape, layout))
        copy = replace(first, local_name="output_layer.weight", chunk=(layout.vpp or 1) - 1)
        shards += _tensor_shards(shape, copy, layout, coord)
    return shards


def tensor_places(
    shape: ModelShape,
    layout: ParallelLayout | None = None,
    coord: Mapping[str, int] | None = None,
    *,
    stacked: bool = False,
) -> Iterator[Place]:
    """Every tensor of the model, or of the rank at ``coord``: of its stage, and of each layer its own experts.

    ``stacked``: the experts of a layer are one tensor with a leading dimension, with ``*`` in its name for their
    number.
    """
    layout = layout or ParallelLayout(1)
    rows = find_family(shape.family).table(shape)
    last_stage, last_chunk = layout.pp - 1, (layout.vpp or 1) - 1
    if coord is None or coord["pp"] == 0:
        for row in rows:
            if row.where is Where.FIRST:
                yield Place(TensorSpec(row.hf_name, row.shape), row, row.local_name)
    expert_layers = set(shape.experts.layers) if shape.experts else set()
    for layer, (stage, chunk, local) in enumerate(layout.layer_places(shape.num_layers)):
        if coord is None or coord["pp"] == stage:
            kind = Where.EXPERT_LAYER if layer in expert_layers else Where.DENSE_LAYER
            held = [row for row in rows if row.where in (Where.LAYER, kind)]
            for tensor, row, experts in _layer_tensors(shape, layout, coord, held, layer, stacked=stacked):
                first = experts.start % (shape.experts.num_experts // layout.ep) if shape.experts else 0
                local_name = row.local_name.format(layer=local)
                yield Place(tensor, row, local_name, stage, chunk, experts, first)
    if coord is None or coord["pp"] == last_stage:
        for row in rows:
            if row.where is Where.LAST:
                yield Place(TensorSpec(row.hf_name, row.shape), row, row.local_name, last_stage, last_chunk)


def _layer_tensors(
    shape: ModelShape,
    layout: ParallelLayout,
    coord: Mapping[str, int] | None,
    rows: list[Row],
    layer: int,
    *,
    stacked: bool,
) -> Iterator[tuple[TensorSpec, Row, range]]:
    """(tensor, row, experts) of one layer, with the experts stacked or one after another."""
    for of_each_expert, group in groupby(rows, key=lambda row: row.of_each_expert):
        if not of_each_expert:
            for row in group:
                name = row.hf_name.format(layer=layer)
                yield TensorSpec(name, row.shape, layer, float32=row.float32), row, range(0)
            continue
        assert shape.experts is not None, "a row for experts in a model without experts"
        each, expert_rows = shape.experts.num_experts // layout.ep, list(group)
        held = (
            range(shape.experts.num_experts) if coord is None else range(each * coord["ep"], each * (coord["ep"] + 1))
        )
        for experts in [held] if stacked else [range(expert, expert + 1) for expert in held]:
            for row in expert_rows:
                name = row.hf_name.format(layer=layer, expert="*" if stacked else experts.start)
                size = (shape.experts.num_experts, *row.shape) if stacked else row.shape
                yield TensorSpec(name, size, layer, None if stacked else experts.start), row, experts


def _tensor_shards(shape: ModelShape, place: Place, layout: ParallelLayout, coord: Mapping[str, int]) -> list[Shard]:
    row = place.row
    tp, tp_rank = (layout.etp, coord["etp"]) if row.of_each_expert else (layout.tp, coord["tp"])

    def shard(dim: int, start: int, stop: int, local: int) -> Shard:
        return place_shard(place, dim, start, stop, local)

    size = row.shape[0]
    match row.cut:
        case Cut.WHOLE:
            return [shard(0, 0, size, 0)]
        case Cut.COLUMNS | Cut.EXPERT_DOWN:
            part = row.shape[1] // tp
            return [shard(1, tp_rank * part, (tp_rank + 1) * part, 0)]
        case Cut.ROWS:
            part = size // tp
            return [shard(0, tp_rank * part, (tp_rank + 1) * part, 0)]
        case Cut.VOCAB:
            part = padded_vocab(size, tp) // tp
            start, stop = tp_rank * part, min((tp_rank + 1) * part, size)
            return [shard(0, start, stop, 0)] if start < stop else []
        case Cut.GATE_UP | Cut.EXPERT_GATE_UP:
            part = size // tp
            return [shard(0, tp_rank * part, (tp_rank + 1) * part, row.part * part)]
        case Cut.QKV:
            return _qkv_shards(shape, row.part, tp, tp_rank, shard)


def place_shard(place: Place, dim: int, start: int, stop: int, local: int) -> Shard:
    """Rows (``dim`` 0) or columns from ``start`` to ``stop`` of the place's tensor, or of each expert in its stack."""
    size, at = place.row.shape, [0] * len(place.row.shape)
    begin, end = [0] * len(size), list(size)
    begin[dim], end[dim], at[dim] = start, stop, local
    if place.row.of_each_expert:
        at.insert(0, place.local_expert)
        if place.tensor.expert is None:  # a stack
            begin.insert(0, place.experts.start)
            end.insert(0, place.experts.stop)
    return Shard(place.tensor, Box(tuple(begin), tuple(end)), place.local_name, tuple(at), place.chunk)


def _qkv_shards(
    shape: ModelShape, part: int, tp: int, tp_rank: int, shard: Callable[[int, int, int, int], Shard]
) -> list[Shard]:
    """The rank's slice of Megatron's fused rows, ordered by query group, in the coordinates of q, k or v.

    With more ranks than key-value heads a rank's slice starts or ends inside a group, so segments are intersected.
    """
    queries = shape.num_heads // shape.num_kv_heads
    group_rows = (queries + 2) * shape.head_dim
    offset = (0, queries * shape.head_dim, (queries + 1) * shape.head_dim)[part]
    length = (queries if part == 0 else 1) * shape.head_dim
    local_rows = shape.num_kv_heads * group_rows // tp
    begin, end = tp_rank * local_rows, (tp_rank + 1) * local_rows
    shards = []
    for group in range(shape.num_kv_heads):
        fused = group * group_rows + offset
        start, stop = max(begin, fused), min(end, fused + length)
        if start < stop:
            source = group * length + start - fused
            shards.append(shard(0, source, source + stop - start, start - begin))
    return shards


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements ``start`` to ``stop`` of a tensor in row-major order, as consecutive boxes.

    At most ``2 * len(shape) - 1``: a part of the first row, whole rows, a part of the last row.
    """
    assert 0 <= start <= stop <= prod(shape), f"{start} to {stop} of {shape}"
    if start == stop:
        return []
    if len(shape) < 2:
        return [Box((start,), (stop,))] if shape else [Box((), ())]
    rows, size = shape[1:], prod(shape[1:])
    first, last = -(-start // size), stop // size  # whole rows
    if first > last:
        return _inside(first - 1, flat_boxes(rows, start % size, stop % size))
    found = _inside(first - 1, flat_boxes(rows, start % size, size)) if start % size else []
    if first < last:
        found.append(Box((first, *(0 for _ in rows)), (last, *rows)))
    return found + _inside(last, flat_boxes(rows, 0, stop % size))


def _inside(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.start), (row + 1, *box.stop)) for box in boxes]

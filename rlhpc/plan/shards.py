"""Where a model's weights are: tensors in HuggingFace's names and shapes, boxes of them, and who keeps which box.

These coordinates are common to every side (Megatron, a HuggingFace file, an engine): loading, saving and moving
weights are all one operation, the intersection of two lists of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlhpc.core.errors import UserError
from rlhpc.models import FAMILIES, ModelShape
from rlhpc.models.tables import Cut, Row, Where
from rlhpc.plan.layout import ParallelLayout


@dataclass(frozen=True)
class TensorSpec:
    """One weight of the model as HuggingFace names and shapes it."""

    name: str
    shape: tuple[int, ...]
    layer: int | None = None


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


@dataclass(frozen=True)
class Shard:
    """A rank keeps ``box`` of ``tensor`` in its parameter ``local_name`` at ``local_start``.

    ``chunk`` is the virtual pipeline stage whose module holds the parameter.
    """

    tensor: TensorSpec
    box: Box
    local_name: str
    local_start: tuple[int, ...]
    chunk: int = 0

    @property
    def local_box(self) -> Box:
        stop = tuple(a + n for a, n in zip(self.local_start, self.box.shape, strict=True))
        return Box(self.local_start, stop)


def model_tensors(shape: ModelShape) -> list[TensorSpec]:
    """Every tensor of the model, in the order of its layers."""
    return [tensor for tensor, *_ in _placed_rows(shape)]


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of embedding and head in Megatron: the vocabulary, up to a multiple of tp."""
    return -(-vocab_size // tp) * tp


def check_divides(shape: ModelShape, tp: int, where: str) -> None:
    """Refuse a tensor-parallel size that does not divide the model, naming what it does not divide."""
    for label, number in (("attention heads", shape.num_heads), ("feed-forward size", shape.ffn_size)):
        if number % tp:
            valid = [d for d in range(1, shape.num_heads + 1) if not (shape.num_heads % d or shape.ffn_size % d)]
            raise UserError(
                f"{tp} does not divide the model's {number} {label}", where=where, remedy=f"use one of {valid}"
            )
    if max(tp, shape.num_kv_heads) % min(tp, shape.num_kv_heads):
        raise UserError(
            f"{tp} and the model's {shape.num_kv_heads} key-value heads do not divide one another",
            where=where,
            remedy=f"use a divisor or a multiple of {shape.num_kv_heads}",
        )


def megatron_shards(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[Shard]:
    """What one rank of the training side keeps, in the order of the model's tensors."""
    coord = layout.coord(rank)
    tp_rank, pp_rank = coord["tp"], coord["pp"]
    shards: list[Shard] = []
    for tensor, row, chunk, stage, local_name in _placed_rows(shape, layout):
        if stage == pp_rank:
            shards += _tensor_shards(shape, tensor, row, local_name, chunk, layout.tp, tp_rank)
    if shape.tied_embeddings and layout.pp > 1 and pp_rank == layout.pp - 1:
        # Megatron keeps a second copy of tied embeddings on the last stage.
        tensor, row, *_ = next(_placed_rows(shape, layout))
        shards += _tensor_shards(shape, tensor, row, "output_layer.weight", (layout.vpp or 1) - 1, layout.tp, tp_rank)
    return shards


def layer_place(layer: int, num_layers: int, pp: int, vpp: int | None) -> tuple[int, int, int]:
    """(pipeline rank, chunk, number inside the chunk) of a layer: chunks of equal size dealt round the ranks."""
    chunks = pp * (vpp or 1)
    per_chunk, rest = divmod(num_layers, chunks)
    if rest:
        raise UserError(
            f"{num_layers} layers do not divide into pp {pp} x vpp {vpp or 1} = {chunks} chunks",
            where="parallel.pp",
            remedy="choose sizes whose product divides the number of layers",
        )
    chunk, local = divmod(layer, per_chunk)
    return chunk % pp, chunk // pp, local


def _placed_rows(
    shape: ModelShape, layout: ParallelLayout | None = None
) -> Iterator[tuple[TensorSpec, Row, int, int, str]]:
    """(tensor, its row, chunk, pipeline rank, local name) of every tensor of the model."""
    pp, vpp = (layout.pp, layout.vpp) if layout else (1, None)
    rows = FAMILIES[shape.family].table(shape)
    for row in rows:
        if row.where is Where.FIRST:
            yield TensorSpec(row.hf_name, row.shape), row, 0, 0, row.local_name
    for layer in range(shape.num_layers):
        stage, chunk, local = layer_place(layer, shape.num_layers, pp, vpp)
        for row in rows:
            if row.where is Where.LAYER:
                tensor = TensorSpec(row.hf_name.format(layer=layer), row.shape, layer)
                yield tensor, row, chunk, stage, row.local_name.format(layer=local)
    for row in rows:
        if row.where is Where.LAST:
            yield TensorSpec(row.hf_name, row.shape), row, (vpp or 1) - 1, pp - 1, row.local_name


def _tensor_shards(
    shape: ModelShape, tensor: TensorSpec, row: Row, local_name: str, chunk: int, tp: int, tp_rank: int
) -> list[Shard]:
    def shard(dim: int, start: int, stop: int, local: int) -> Shard:
        begin, end, at = [0] * len(tensor.shape), list(tensor.shape), [0] * len(tensor.shape)
        begin[dim], end[dim], at[dim] = start, stop, local
        return Shard(tensor, Box(tuple(begin), tuple(end)), local_name, tuple(at), chunk)

    size = tensor.shape[0]
    match row.cut:
        case Cut.WHOLE:
            return [shard(0, 0, size, 0)]
        case Cut.COLUMNS:
            part = tensor.shape[1] // tp
            return [shard(1, tp_rank * part, (tp_rank + 1) * part, 0)]
        case Cut.ROWS | Cut.VOCAB:
            part = padded_vocab(size, tp) // tp
            start, stop = tp_rank * part, min((tp_rank + 1) * part, size)
            return [shard(0, start, stop, 0)] if start < stop else []
        case Cut.GATE_UP:
            part = size // tp
            return [shard(0, tp_rank * part, (tp_rank + 1) * part, row.part * part)]
        case Cut.QKV:
            return _qkv_shards(shape, row.part, tp, tp_rank, shard)


def _qkv_shards(
    shape: ModelShape, part: int, tp: int, tp_rank: int, shard: Callable[[int, int, int, int], Shard]
) -> list[Shard]:
    """The rank's slice of Megatron's fused rows, cut by query group, back in the coordinates of q, k or v.

    With more ranks than key-value heads a rank's slice begins or ends inside a group, so segments are intersected.
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

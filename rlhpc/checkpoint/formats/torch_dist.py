"""A model in Megatron's torch_dist checkpoints: whole tensors by key, in coordinates independent of the layout.

Uniform layers are stacked into one tensor, with the layer as its first dimension. A model with experts has a tensor for
each layer: Megatron treats any list of expert layers as layers that differ (transformer_block.py, sharded_state_dict).
The layout determines only the chunks of a tensor, which any other layout can read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod

from rlhpc.models import Cut, ModelShape, Row
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Box, Shard, megatron_shards, padded_vocab, tensor_places

_LAYERS = "decoder.layers."
_PARALLEL_LINEAR = (Cut.ROWS, Cut.COLUMNS, Cut.QKV, Cut.GATE_UP)


@dataclass(frozen=True)
class CheckpointParameter:
    """One parameter of an unsharded model: the part of tensor ``key`` at ``lead``, its layer if layers are stacked.

    ``shards`` are the boxes of HuggingFace's tensors that it consists of, with ``local_start`` inside ``shape``.
    """

    key: str
    shape: tuple[int, ...]
    cut: Cut
    shards: tuple[Shard, ...]
    layer: int | None = None
    stack: int | None = None  # layers that share the key
    float32: bool = False

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.stack is None else (int(self.layer or 0),)

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.stack is None else (self.stack, *self.shape)

    @property
    def pads(self) -> bool:
        """Whether its rows are the vocabulary, whose padding depends on the layout."""
        return self.cut is Cut.VOCAB

    def with_rows(self, rows: int) -> CheckpointParameter:
        """Copy with another number of rows for the vocabulary."""
        return replace(self, shape=(rows, *self.shape[1:]))

    def in_key(self, box: Box) -> Box:
        """A box of the parameter in the coordinates of the key's tensor."""
        return Box((*self.lead, *box.start), (*(at + 1 for at in self.lead), *box.stop))

    def within(self, box: Box) -> Iterator[tuple[Shard, Box]]:
        """Parts of shards that a box of the parameter consists of, and the box of each in the parameter."""
        for (first, last), held in self._by_rows.items():
            if first >= box.stop[0] or last <= box.start[0]:
                continue
            for shard, local in held:
                met = local.meet(box)
                if met is None:
                    continue
                lead = len(met.start) - len(shard.box.start)
                ahead = [a - b for a, b in zip(met.start, local.start, strict=True)][lead:]
                start = tuple(a + b for a, b in zip(shard.box.start, ahead, strict=True))
                stop = tuple(a + n for a, n in zip(start, met.shape[lead:], strict=True))
                yield shard.part(Box(start, stop)), met

    @cached_property
    def _by_rows(self) -> dict[tuple[int, int], list[tuple[Shard, Box]]]:
        """Shards by their range of the first dimension, because a stack of experts has thousands."""
        found: dict[tuple[int, int], list[tuple[Shard, Box]]] = {}
        for shard in self.shards:
            box = shard.local_box
            found.setdefault((box.start[0], box.stop[0]), []).append((shard, box))
        return found


def checkpoint_parameters(shape: ModelShape, tp: int = 1) -> list[CheckpointParameter]:
    """Every parameter, in order of layers; rows of embedding and head are padded for ``tp``."""
    shards: dict[str, list[Shard]] = {}
    for shard in megatron_shards(shape, ParallelLayout(1), 0):
        shards.setdefault(shard.local_name, []).append(shard)
    cuts = {place.local_name: (place.row, place.tensor.layer) for place in tensor_places(shape)}
    return [_parameter(shape, name, held, *cuts[name], tp) for name, held in shards.items()]


def _parameter(
    shape: ModelShape, name: str, shards: list[Shard], row: Row, layer: int | None, tp: int
) -> CheckpointParameter:
    size = [max(stops) for stops in zip(*(shard.local_box.stop for shard in shards), strict=True)]
    if row.cut is Cut.VOCAB:
        size[0] = padded_vocab(size[0], tp)
    stacked = layer is not None and shape.experts is None
    key = name.replace(f"{_LAYERS}{layer}.", _LAYERS) if stacked else name
    stack = shape.num_layers if stacked else None
    return CheckpointParameter(key, tuple(size), row.cut, tuple(shards), layer, stack, row.float32)


def extra_states(parameters: list[CheckpointParameter]) -> list[str]:
    """Keys of the empty states that Megatron's parallel linears save beside their weights and require on loading."""
    keys = []
    for parameter in parameters:
        if parameter.cut in _PARALLEL_LINEAR and parameter.key.endswith(".weight"):
            at, of = (0, 1) if parameter.stack is None else (parameter.layer, parameter.stack)
            keys.append(f"{parameter.key.removesuffix('weight')}_extra_state/shard_{at}_{of}")
    return keys


def chunk_boxes(parameter: CheckpointParameter, layout: ParallelLayout, max_elements: int) -> list[Box]:
    """Boxes of a parameter on the layout's ranks, split further by rows to at most ``max_elements``."""
    parts = [1] * len(parameter.shape)
    match parameter.cut:
        case Cut.ROWS | Cut.QKV | Cut.VOCAB:
            parts[0] = layout.tp
        case Cut.COLUMNS:
            parts[1] = layout.tp
        case Cut.GATE_UP:
            parts[0] = 2 * layout.tp
        case Cut.EXPERT_GATE_UP:
            parts[0], parts[1] = layout.ep, 2 * layout.etp
        case Cut.EXPERT_DOWN:
            parts[0], parts[2] = layout.ep, layout.etp
        case Cut.WHOLE:
            pass
    sizes = [n // p for n, p in zip(parameter.shape, parts, strict=True)]
    assert all(n % p == 0 for n, p in zip(parameter.shape, parts, strict=True)), (
        f"{parameter.key} does not divide evenly"
    )
    boxes = []
    for index in product(*map(range, parts)):
        start = tuple(i * n for i, n in zip(index, sizes, strict=True))
        boxes += cut_box(Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True))), max_elements)
    return boxes


def cut_box(box: Box, max_elements: int) -> list[Box]:
    """Splits a box along its first dimensions into parts of at most ``max_elements``, or single rows."""
    if box.volume <= max_elements or len(box.start) == 0:
        return [box]
    dim = next((d for d, n in enumerate(box.shape[:-1]) if n > 1), len(box.start) - 1)
    step = max(1, max_elements // prod(box.shape[dim + 1 :]))
    parts = []
    for at in range(box.start[dim], box.stop[dim], step):
        start, stop = list(box.start), list(box.stop)
        start[dim], stop[dim] = at, min(at + step, box.stop[dim])
        parts += cut_box(Box(tuple(start), tuple(stop)), max_elements)
    return parts


def tiles(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether the boxes contain every element of ``shape`` exactly once."""
    inside = all(len(box.start) == len(shape) and Box((0,) * len(shape), shape).meet(box) == box for box in boxes)
    return inside and sum(box.volume for box in boxes) == prod(shape) and not _overlap(boxes, 0)


def _overlap(boxes: list[Box], dim: int) -> bool:
    """Whether any two boxes overlap. Boxes in a grid are separated dimension by dimension."""
    if len(boxes) < 2:
        return False
    if dim == len(boxes[0].start):
        return True
    columns: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        columns.setdefault((box.start[dim], box.stop[dim]), []).append(box)
    spans = sorted(columns)
    if any(a[1] > b[0] for a, b in pairwise(spans)):
        return any(a.meet(b) for i, a in enumerate(boxes) for b in boxes[:i])
    return any(_overlap(column, dim + 1) for column in columns.values())

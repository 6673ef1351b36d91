"""Finds the ranks that hold a block. The geometry of boxes is computed once for all layers that share it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from rlhpc.sharding.shards import Box, Shard, TensorSpec

Cells = tuple[tuple[Box, tuple[int, ...]], ...]  # disjoint boxes, each with the indices of the boxes that contain it
_Key = tuple[tuple[int, ...], ...]  # starts and stops of boxes, faster to hash than the boxes


class Block(NamedTuple):
    """Part of a wanted box that each of its holders has in a single shard. Sizes are in bytes."""

    box: Box
    size: int
    pieces: tuple[tuple[Box, int], ...]  # the box cut so that each piece fits a bucket


class BlockHolders(NamedTuple):
    """Holders of a block: its shards by rank, and the ranks in order, of the job and per node."""

    shards: dict[int, Shard]
    ranks: tuple[int, ...]
    by_node: dict[int, tuple[int, ...]]


class Located(NamedTuple):
    """A wanted box in blocks, with their holders. ``cut``: boxes overlap, so blocks may be finer than necessary."""

    blocks: tuple[Block, ...]
    held: tuple[BlockHolders, ...]
    cut: bool


class BlockIndex:
    """Index of the source side's shards."""

    def __init__(
        self, source: Mapping[int, Sequence[Shard]], ranks_per_node: int, bucket_bytes: int, itemsize: int
    ) -> None:
        self._ranks_per_node, self._bucket_bytes, self._itemsize = ranks_per_node, bucket_bytes, itemsize
        self._shards: dict[TensorSpec, dict[Box, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
        for rank in sorted(source):
            for shard in source[rank]:
                self._shards[shard.tensor][shard.box].setdefault(rank, shard)
        self._located: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Located] = {}
        self._known_holders: dict[tuple[TensorSpec, tuple[int, ...]], BlockHolders] = {}
        self._cells: dict[_Key, Cells] = {}
        self._blocks: dict[tuple[_Key, Box, bool], tuple[tuple[Block, tuple[int, ...]], ...]] = {}

    def of(self, wanted: Shard) -> Located:
        """The blocks that make up a wanted box, with their holders. Asserts that the ranks hold all of it."""
        key = (wanted.tensor.name, wanted.box.start, wanted.box.stop)
        found = self._located.get(key)
        if found is None:
            found = self._located[key] = self._find(wanted)
        return found

    def block(self, box: Box, tensor: TensorSpec) -> Block:
        """The box as a block, cut to fit buckets."""
        each = size_of(tensor, self._itemsize)
        assert each <= self._bucket_bytes, f"an element of {tensor.name} in a bucket of {self._bucket_bytes} bytes"
        pieces = ((piece, piece.volume * each) for piece in _pieces(box, self._bucket_bytes // each))
        return Block(box, box.volume * each, tuple(pieces))

    def _find(self, wanted: Shard) -> Located:
        tensor = wanted.tensor
        assert tensor in self._shards, f"no rank holds {tensor.name} of shape {tensor.shape}"
        by_box = self._shards[tensor]
        boxes = sorted(by_box, key=lambda box: (box.start, box.stop))
        geometry: _Key = tuple(corner for box in boxes for corner in (box.start, box.stop))
        cells = self._cells.get(geometry)
        if cells is None:
            cells = self._cells[geometry] = cells_of(boxes)
        blocks = self._blocks.get((geometry, wanted.box, tensor.float32))
        if blocks is None:
            blocks = self._blocks[geometry, wanted.box, tensor.float32] = tuple(self._cut(cells, wanted))
        held = tuple(self._holding(tensor, inside, [by_box[boxes[index]] for index in inside]) for _, inside in blocks)
        return Located(tuple(block for block, _ in blocks), held, len(cells) > len(boxes))

    def _cut(self, cells: Cells, wanted: Shard) -> Iterator[tuple[Block, tuple[int, ...]]]:
        volume = 0
        for cell, inside in cells:
            part = cell.meet(wanted.box)
            if part is not None:
                volume += part.volume
                yield self.block(part, wanted.tensor), inside
        assert volume == wanted.box.volume, f"{wanted.box} of {wanted.tensor.name} is not held whole"

    def _holding(self, tensor: TensorSpec, inside: tuple[int, ...], shards: list[dict[int, Shard]]) -> BlockHolders:
        """Holders of one cell: the ranks that hold any of the boxes ``inside`` which it lies."""
        held = self._known_holders.get((tensor, inside))
        if held is None:
            by_rank: dict[int, Shard] = {}
            for ranks in shards:
                by_rank = {**ranks, **by_rank}
            nodes: dict[int, list[int]] = defaultdict(list)
            for rank in sorted(by_rank):
                nodes[rank // self._ranks_per_node].append(rank)
            by_node = {node: tuple(ranks) for node, ranks in nodes.items()}
            held = self._known_holders[tensor, inside] = BlockHolders(by_rank, tuple(sorted(by_rank)), by_node)
        return held


def size_of(tensor: TensorSpec, itemsize: int) -> int:
    """Bytes per element; ``itemsize`` is that of the model's dtype."""
    return 4 if tensor.float32 else itemsize


def cells_of(boxes: Sequence[Box]) -> Cells:
    """Disjoint boxes that make up the given ones."""
    if all(a.meet(b) is None for i, a in enumerate(boxes) for b in boxes[:i]):
        return tuple((box, (i,)) for i, box in enumerate(boxes))
    dims = len(boxes[0].start)
    cuts = [sorted({at for box in boxes for at in (box.start[dim], box.stop[dim])}) for dim in range(dims)]
    cells = []
    for ranges in product(*(pairwise(cut) for cut in cuts)):
        cell = Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
        inside = tuple(i for i, box in enumerate(boxes) if box.meet(cell) == cell)
        if inside:
            cells.append((cell, inside))
    return tuple(cells)


def joined(first: Box, second: Box) -> Box | None:
    """The union of two boxes if the second continues the first along one dimension, else None."""
    dims = range(len(first.start))
    apart = [i for i in dims if (first.start[i], first.stop[i]) != (second.start[i], second.stop[i])]
    if len(apart) == 1 and first.stop[apart[0]] == second.start[apart[0]]:
        return Box(first.start, second.stop)
    return None


def joined_shards(shards: Sequence[Shard]) -> list[Shard]:
    """The shards, with neighbors merged that are contiguous both in the tensor and in the local parameter."""
    found: list[Shard] = []
    for shard in shards:
        while found and (whole := _continued(found[-1], shard)) is not None:
            found.pop()
            shard = whole
        found.append(shard)
    return found


def _continued(first: Shard, second: Shard) -> Shard | None:
    box = joined(first.box, second.box) if first.tensor == second.tensor else None
    whole = None if box is None else Shard(first.tensor, box, first.local_name, first.local_start, first.chunk)
    return whole if whole is not None and whole.part(second.box) == second else None


def _pieces(box: Box, most: int) -> Iterator[Box]:
    """The box in pieces of at most ``most`` elements, cut along its first dimensions."""
    if box.volume <= most:
        yield box
        return
    dim = next(i for i, size in enumerate(box.shape) if size > 1)
    step = max(1, most // (box.volume // box.shape[dim]))
    for start in range(box.start[dim], box.stop[dim], step):
        begin, end = list(box.start), list(box.stop)
        begin[dim], end[dim] = start, min(start + step, end[dim])
        yield from _pieces(Box(tuple(begin), tuple(end)), most)

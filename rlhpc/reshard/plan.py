"""Plan of the copies that move weights from one layout of shards into another.

Works on boxes and ranks, without models or torch. Every block that a rank needs is copied from the nearest rank that
holds it: itself, one of its node, else the one that has sent the fewest bytes. Copies between ranks are assigned to
buckets; in each bucket no rank sends or receives more than a given number of bytes. The geometry of boxes is computed
once for all layers that share it.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from rlhpc.sharding.shards import Box, Shard, TensorSpec

Cells = tuple[tuple[Box, tuple[int, ...]], ...]  # disjoint boxes, each with the indices of the boxes that contain it
_Key = tuple[tuple[int, ...], ...]  # starts and stops of boxes, faster to hash than the boxes
Side = Mapping[int, Sequence[Shard]]  # each rank's shards
_FULL = 0.8  # fill level above which a bucket is closed once a piece as large as the last would not fit


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


@dataclass(frozen=True)
class Copy:
    """Copy of one box of a tensor, from where the source rank keeps it to where the target rank does.

    ``bucket`` is the number of the exchange, from 0; -1 for a copy inside one rank.
    """

    source_rank: int
    target_rank: int
    source: Shard
    target: Shard
    bucket: int = -1

    @property
    def tensor(self) -> TensorSpec:
        return self.target.tensor

    @property
    def box(self) -> Box:
        return self.target.box


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank copies locally, and sends and receives within its node and across nodes."""

    local: int = 0
    sent_within: int = 0
    sent_across: int = 0
    received_within: int = 0
    received_across: int = 0

    @property
    def sent(self) -> int:
        return self.sent_within + self.sent_across

    @property
    def received(self) -> int:
        return self.received_within + self.received_across


@dataclass(frozen=True)
class ReshardPlan:
    """``copies`` of the requested ranks, in the order in which both sides pack and unpack a bucket."""

    copies: tuple[Copy, ...]
    traffic: Mapping[int, Traffic]  # of every rank of either side
    num_copies: int  # of all ranks
    num_buckets: int
    bucket_bytes: int
    largest_bucket: int  # maximum bytes that a rank sends or receives in one bucket
    digest: str  # over both sides and all ranks' copies

    def local(self, rank: int) -> list[Copy]:
        """Copies that never leave the rank."""
        return [copy for copy in self.copies if copy.bucket < 0 and copy.target_rank == rank]

    def sends(self, rank: int) -> list[list[Copy]]:
        """Copies that the rank sends in each bucket, ordered by receiver."""
        mine = [copy for copy in self.copies if copy.bucket >= 0 and copy.source_rank == rank]
        return self._by_bucket(sorted(mine, key=lambda copy: copy.target_rank))

    def receives(self, rank: int) -> list[list[Copy]]:
        """Copies that the rank receives in each bucket, ordered by sender."""
        mine = [copy for copy in self.copies if copy.bucket >= 0 and copy.target_rank == rank]
        return self._by_bucket(sorted(mine, key=lambda copy: copy.source_rank))

    def _by_bucket(self, copies: Iterable[Copy]) -> list[list[Copy]]:
        buckets: list[list[Copy]] = [[] for _ in range(self.num_buckets)]
        for copy in copies:
            buckets[copy.bucket].append(copy)
        return buckets


def plan_reshard(
    source: Side,
    target: Side,
    *,
    ranks_per_node: int,
    bucket_bytes: int,
    itemsize: int,
    keep: Iterable[int] | None = None,
) -> ReshardPlan:
    """Copies that write every element of ``target`` once. ``keep``: ranks whose copies the plan holds; default: all.

    ``itemsize`` is that of the model's dtype. A rank without shards on one side takes part on the other only. Every
    rank computes the same plan regardless of ``keep``, which the digest proves. Ranks whose shards are one list object
    are processed once.
    """
    ranks = sorted({*source, *target})
    source, target = _joined_side(source), _joined_side(target)
    digest = _digest_of(source, target, (ranks_per_node, bucket_bytes, itemsize))
    index = BlockIndex(source, ranks_per_node, bucket_bytes, itemsize)
    chooser, buckets = _Chooser(ranks_per_node), _Buckets(bucket_bytes, ranks)
    kept, count = None if keep is None else frozenset(keep), 0
    copies: list[Copy] = []
    for rank, wanted in _in_turn(target):
        found = index.of(wanted)
        senders = chooser.choose(rank, found)
        if found.cut and len(senders) > 1:
            found, senders = _rejoined(index, wanted.tensor, found, senders)
        numbers = buckets.place(rank, found.blocks, senders)
        digest.update(array("q", senders + numbers))
        count += len(numbers)
        if kept is None or rank in kept or not kept.isdisjoint(senders):
            copies += _copies(rank, wanted, found, senders, numbers, kept)
    return ReshardPlan(
        copies=tuple(copies),
        traffic={rank: chooser.traffic(rank) for rank in ranks},
        num_copies=count,
        num_buckets=buckets.count,
        bucket_bytes=bucket_bytes,
        largest_bucket=buckets.largest,
        digest=digest.hexdigest(),
    )


def lower_bound(source: Side, target: Side, itemsize: int) -> dict[int, int]:
    """Minimum bytes that each rank must receive: what it needs and does not hold."""
    least = {}
    for rank, wanted in target.items():
        held: dict[TensorSpec, set[Box]] = defaultdict(set)
        for shard in source.get(rank, ()):
            held[shard.tensor].add(shard.box)
        least[rank] = sum(_lacking(shard, held[shard.tensor]) * size_of(shard.tensor, itemsize) for shard in wanted)
    return least


def _lacking(wanted: Shard, held: set[Box]) -> int:
    """Number of elements of the wanted box outside all boxes held."""
    if not held:
        return wanted.box.volume
    common = {box for box in (box.meet(wanted.box) for box in held) if box is not None}
    cells = cells_of(sorted(common, key=lambda box: box.start)) if common else ()
    return wanted.box.volume - sum(cell.volume for cell, _ in cells)


def _joined_side(side: Side) -> Side:
    """The side with neighboring shards merged; ranks that share a list object still do."""
    lists = {id(shards): joined_shards(shards) for shards in side.values()}
    return {rank: lists[id(shards)] for rank, shards in side.items() if shards}


def _in_turn(target: Side) -> Iterator[tuple[int, Shard]]:
    """One shard of each rank in turn. Ranks begin at different places of the model, so that no sender is requested by
    all of them at once."""
    ranks = sorted(target)
    for step in range(max((len(target[rank]) for rank in ranks), default=0)):
        for place, rank in enumerate(ranks):
            shards = target[rank]
            if step < len(shards):
                yield rank, shards[(step + len(shards) * place // len(ranks)) % len(shards)]


class _Chooser:
    """Chooses the sender of each block by the bytes that each rank has sent."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._local: dict[int, int] = defaultdict(int)
        self._sent: dict[int, int] = defaultdict(int)
        self._sent_within: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)
        self._received_within: dict[int, int] = defaultdict(int)

    def choose(self, rank: int, found: Located) -> list[int]:
        """The sender of each block: the rank itself, the least loaded of its node, or the least loaded of all."""
        node, sent, senders = rank // self._ranks_per_node, self._sent, []
        received = within = 0
        for block, held in zip(found.blocks, found.held, strict=True):
            size = block.size
            if rank in held.shards:
                senders.append(rank)
                self._local[rank] += size
                continue
            near = held.by_node.get(node)
            ranks = near or held.ranks
            sender = ranks[0] if len(ranks) == 1 else min(ranks, key=sent.__getitem__)
            senders.append(sender)
            sent[sender] += size
            received += size
            if near:
                self._sent_within[sender] += size
                within += size
        self._received[rank] += received
        self._received_within[rank] += within
        return senders

    def traffic(self, rank: int) -> Traffic:
        within, received_within = self._sent_within[rank], self._received_within[rank]
        across, received_across = self._sent[rank] - within, self._received[rank] - received_within
        return Traffic(self._local[rank], within, across, received_within, received_across)


class _Buckets:
    """Assigns each copy to the first bucket in which both its ranks have room."""

    def __init__(self, bucket_bytes: int, ranks: Collection[int]) -> None:
        self._bytes = bucket_bytes
        # Bytes that each rank sends and receives in each bucket, with an empty bucket after the last.
        self._sent = {rank: [0] for rank in ranks}
        self._received = {rank: [0] for rank in ranks}
        # The first bucket of each rank that is not yet (almost) full.
        self._first_sent, self._first_received = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        self.count = 0

    def place(self, rank: int, blocks: Sequence[Block], senders: Sequence[int]) -> list[int]:
        """The bucket of each piece that the rank receives; -1 for a block that it holds itself."""
        numbers = []
        received, limit, enough = self._received[rank], self._bytes, int(_FULL * self._bytes)
        for block, sender in zip(blocks, senders, strict=True):
            if sender == rank:
                numbers.append(-1)
                continue
            sent = self._sent[sender]
            for _, size in block.pieces:
                bucket, room = max(self._first_sent[sender], self._first_received[rank]), limit - size
                while sent[bucket] > room or received[bucket] > room:
                    bucket += 1
                numbers.append(bucket)
                sent[bucket] += size
                received[bucket] += size
                if bucket == self.count:
                    self._add()
                full = max(room, enough)
                while sent[self._first_sent[sender]] > full:
                    self._first_sent[sender] += 1
                while received[self._first_received[rank]] > full:
                    self._first_received[rank] += 1
        return numbers

    @property
    def largest(self) -> int:
        """Maximum bytes that a rank sends or receives in one bucket."""
        return max((max(filled) for side in (self._sent, self._received) for filled in side.values()), default=0)

    def _add(self) -> None:
        self.count += 1
        for rank, sent in self._sent.items():
            sent.append(0)
            self._received[rank].append(0)


def _rejoined(index: BlockIndex, tensor: TensorSpec, found: Located, senders: list[int]) -> tuple[Located, list[int]]:
    """The blocks, with neighbors merged that come from one shard of one sender."""
    blocks: list[tuple[Block, BlockHolders, int]] = []
    for block, held, sender in zip(found.blocks, found.held, senders, strict=True):
        while blocks and blocks[-1][2] == sender and blocks[-1][1].shards[sender] is held.shards[sender]:
            whole = joined(blocks[-1][0].box, block.box)
            if whole is None:
                break
            blocks.pop()
            block = index.block(whole, tensor)
        blocks.append((block, held, sender))
    merged = Located(tuple(b for b, _, _ in blocks), tuple(h for _, h, _ in blocks), cut=True)
    return merged, [sender for _, _, sender in blocks]


def _copies(
    rank: int, wanted: Shard, found: Located, senders: list[int], numbers: list[int], kept: frozenset[int] | None
) -> Iterator[Copy]:
    """The copies into a rank's wanted shard that the plan keeps."""
    buckets = iter(numbers)
    for block, held, sender in zip(found.blocks, found.held, senders, strict=True):
        pieces = [block.box] if sender == rank else [box for box, _ in block.pieces]
        for box in pieces:
            bucket = next(buckets)
            if kept is None or rank in kept or sender in kept:
                yield Copy(sender, rank, held.shards[sender].part(box), wanted.part(box), bucket)


def _digest_of(source: Side, target: Side, numbers: tuple[int, ...]) -> hashlib.blake2b:
    """Digest of the plan's inputs; senders and buckets are added later."""
    digest = hashlib.blake2b(struct.pack("<3q", *numbers), digest_size=16)
    for side in (source, target):
        lists = {id(shards): encoded(shards) for shards in side.values()}
        for rank in sorted(side):
            digest.update(struct.pack("<q", rank) + lists[id(side[rank])])
        digest.update(b"\0")
    return digest


def encoded(shards: Sequence[Shard]) -> bytes:
    """Digest of a rank's shards."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        tensor, box = shard.tensor, shard.box
        numbers = (tensor.float32, shard.chunk, *tensor.shape, *box.start, *box.stop, *shard.local_start)
        digest.update(f"{tensor.name}\0{shard.local_name}\0{len(numbers)}\0".encode())
        digest.update(array("q", numbers))
    return digest.digest()

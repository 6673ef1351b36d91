"""Who sends which block to whom, so that weights get from one layout of shards into another.

Knows boxes and ranks, neither models nor torch. Every block that a rank needs is copied from the nearest rank that has
it: itself, one of its node, else the one that has sent the least. What must cross ranks is dealt into buckets, in each
of which no rank sends or receives more than a given number of bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

from rlhpc.plan.shards import Box, Shard, TensorSpec

Side = Mapping[int, Sequence[Shard]]  # what each rank keeps


@dataclass(frozen=True)
class Copy:
    """``source`` and ``target`` are the same box of a tensor, where the two ranks keep it.

    ``bucket`` counts the exchanges from 0; -1 for a copy inside one rank.
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


@dataclass
class Traffic:
    """Bytes of one rank."""

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
    """``copies`` of the ranks that were asked for, in the order in which both sides pack and unpack a bucket."""

    copies: tuple[Copy, ...]
    traffic: Mapping[int, Traffic]
    num_copies: int  # of all ranks
    num_buckets: int
    bucket_bytes: int
    largest_bucket: int  # most bytes that a rank sends or receives in one
    digest: str  # of all ranks' copies

    def local(self, rank: int) -> list[Copy]:
        """Copies that never leave the rank."""
        return [copy for copy in self.copies if copy.bucket < 0 and copy.target_rank == rank]

    def sends(self, rank: int) -> list[list[Copy]]:
        """For each bucket what the rank sends, by receiver."""
        return self._by_bucket(copy for copy in self.copies if copy.bucket >= 0 and copy.source_rank == rank)

    def receives(self, rank: int) -> list[list[Copy]]:
        """For each bucket what the rank receives, by sender."""
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
    """Copies that write every element of ``target`` once. ``keep``: whose copies the plan shall hold; default all.

    ``itemsize`` is of the model's dtype. A rank without shards on one side takes part on the other only. The plan is
    the same on every rank, whatever ``keep`` is: its digest says so.
    """
    kept = None if keep is None else set(keep)
    traffic: dict[int, Traffic] = defaultdict(Traffic)
    chooser = _Chooser(ranks_per_node, traffic)
    buckets = _Buckets(bucket_bytes)
    digest, count, copies = hashlib.blake2b(digest_size=16), 0, []
    for copy in _needed(source, target, chooser, bucket_bytes, itemsize):
        size = copy.box.volume * _itemsize(copy.tensor, itemsize)
        chooser.count(copy, size)
        bucket = -1 if copy.source_rank == copy.target_rank else buckets.place(copy, size)
        digest.update(_encoded(copy, bucket))
        count += 1
        if kept is None or copy.source_rank in kept or copy.target_rank in kept:
            copies.append(replace(copy, bucket=bucket))
    return ReshardPlan(
        copies=tuple(copies),
        traffic=dict(sorted(traffic.items())),
        num_copies=count,
        num_buckets=buckets.count,
        bucket_bytes=bucket_bytes,
        largest_bucket=buckets.largest,
        digest=digest.hexdigest(),
    )


def lower_bound(source: Side, target: Side, itemsize: int) -> dict[int, int]:
    """The least bytes that each rank can receive: what it needs and does not hold."""
    least = {}
    for rank, wanted in target.items():
        held: dict[TensorSpec, set[Box]] = defaultdict(set)
        for shard in source.get(rank, ()):
            held[shard.tensor].add(shard.box)
        least[rank] = sum(_lacking(shard, held[shard.tensor]) * _itemsize(shard.tensor, itemsize) for shard in wanted)
    return least


def _lacking(wanted: Shard, held: set[Box]) -> int:
    cells = _cells(tuple(sorted(held, key=lambda box: box.start)), wanted.tensor.shape)
    common = (cell.meet(wanted.box) for cell, _ in cells)
    return wanted.box.volume - sum(box.volume for box in common if box is not None)


def _needed(source: Side, target: Side, chooser: _Chooser, bucket_bytes: int, itemsize: int) -> Iterator[Copy]:
    """Every copy, none larger than a bucket unless it stays on its rank."""
    holders = _Holders(source)
    for rank, wanted in _in_turn(target):
        for box, held in holders.of(wanted):
            sender, shard = chooser.choose(rank, held)
            copy = Copy(sender, rank, shard.part(box), wanted.part(box))
            if sender == rank:
                yield copy
            else:
                yield from _split(copy, bucket_bytes // _itemsize(wanted.tensor, itemsize))


def _in_turn(target: Side) -> Iterator[tuple[int, Shard]]:
    """A shard of each rank in turn, every rank beginning elsewhere in the model: no sender is asked by all at once."""
    ranks = sorted(rank for rank in target if target[rank])
    for step in range(max((len(target[rank]) for rank in ranks), default=0)):
        for place, rank in enumerate(ranks):
            shards = target[rank]
            if step < len(shards):
                yield rank, shards[(step + len(shards) * place // len(ranks)) % len(shards)]


class _Holders:
    """Which ranks hold which cell of each tensor: cells are disjoint, cover the tensor, and lie whole in a shard."""

    def __init__(self, source: Side) -> None:
        shards: dict[TensorSpec, dict[Box, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
        for rank, held in source.items():
            for shard in held:
                shards[shard.tensor][shard.box].setdefault(rank, shard)
        self._boxes = {tensor: tuple(sorted(boxes, key=lambda box: box.start)) for tensor, boxes in shards.items()}
        self._shards = shards

    def of(self, wanted: Shard) -> Iterator[tuple[Box, list[tuple[int, Shard]]]]:
        """The parts of a wanted box, each with the ranks that have it and where."""
        boxes = self._boxes.get(wanted.tensor)
        assert boxes is not None, f"no rank holds {wanted.tensor.name}"
        by_box = self._shards[wanted.tensor]
        for part, inside in _parts(boxes, wanted.tensor.shape, wanted.box):
            yield part, [item for index in inside for item in by_box[boxes[index]].items()]


@lru_cache(maxsize=1 << 16)
def _parts(boxes: tuple[Box, ...], shape: tuple[int, ...], wanted: Box) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The cells cut by the wanted box, and for each the boxes that contain it. Layers have their geometry in common."""
    parts = []
    for cell, inside in _cells(boxes, shape):
        part = cell.meet(wanted)
        if part is not None:
            parts.append((part, inside))
    assert sum(part.volume for part, _ in parts) == wanted.volume, f"{wanted} is not held whole"
    return tuple(parts)


@lru_cache(maxsize=1 << 12)
def _cells(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Disjoint boxes that make up the given ones, each with the indices of those that contain it."""
    if all(a.meet(b) is None for i, a in enumerate(boxes) for b in boxes[:i]):
        return tuple((box, (i,)) for i, box in enumerate(boxes))
    cuts = [sorted({at for box in boxes for at in (box.start[dim], box.stop[dim])}) for dim in range(len(shape))]
    cells = []
    for ranges in product(*(pairwise(cut) for cut in cuts)):
        cell = Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
        inside = tuple(i for i, box in enumerate(boxes) if box.meet(cell) == cell)
        if inside:
            cells.append((cell, inside))
    return tuple(cells)


class _Chooser:
    """Picks the sender of each block, and keeps the count of bytes that the choice is made by."""

    def __init__(self, ranks_per_node: int, traffic: dict[int, Traffic]) -> None:
        self._ranks_per_node, self._traffic = ranks_per_node, traffic

    def choose(self, rank: int, held: list[tuple[int, Shard]]) -> tuple[int, Shard]:
        """The rank itself, the least loaded of its node, or the least loaded of all."""
        node, near = rank // self._ranks_per_node, []
        for item in held:
            if item[0] == rank:
                return item
            if item[0] // self._ranks_per_node == node:
                near.append(item)
        return min(near or held, key=lambda item: (self._traffic[item[0]].sent, item[0]))

    def count(self, copy: Copy, size: int) -> None:
        sender, receiver = self._traffic[copy.source_rank], self._traffic[copy.target_rank]
        if copy.source_rank == copy.target_rank:
            sender.local += size
            return
        if copy.source_rank // self._ranks_per_node == copy.target_rank // self._ranks_per_node:
            sender.sent_within += size
            receiver.received_within += size
        else:
            sender.sent_across += size
            receiver.received_across += size


class _Buckets:
    """Each copy goes into the first bucket in which both its ranks have room."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bytes = bucket_bytes
        self._sent: dict[int, list[int]] = defaultdict(list)
        self._received: dict[int, list[int]] = defaultdict(list)
        self._first: dict[tuple[int, bool], int] = defaultdict(int)
        self.count = self.largest = 0

    def place(self, copy: Copy, size: int) -> int:
        assert size <= self._bytes, f"{size} bytes of {copy.tensor.name} in a bucket of {self._bytes}"
        sent, received = self._sent[copy.source_rank], self._received[copy.target_rank]
        bucket = max(self._open(copy.source_rank, sent, True), self._open(copy.target_rank, received, False))
        while _at(sent, bucket) + size > self._bytes or _at(received, bucket) + size > self._bytes:
            bucket += 1
        for filled in (sent, received):
            filled += [0] * (bucket + 1 - len(filled))
            filled[bucket] += size
            self.largest = max(self.largest, filled[bucket])
        self.count = max(self.count, bucket + 1)
        return bucket

    def _open(self, rank: int, filled: list[int], sends: bool) -> int:
        """The first bucket of the rank that is not nearly full."""
        first = self._first[rank, sends]
        while first < len(filled) and filled[first] > 0.98 * self._bytes:
            first += 1
        self._first[rank, sends] = first
        return first


def _at(filled: list[int], bucket: int) -> int:
    return filled[bucket] if bucket < len(filled) else 0


def _split(copy: Copy, most: int) -> Iterator[Copy]:
    """The copy in pieces of at most ``most`` elements, cut along its first dimensions."""
    if copy.box.volume <= most:
        yield copy
        return
    dim = next(i for i, size in enumerate(copy.box.shape) if size > 1)
    row = copy.box.volume // copy.box.shape[dim]
    step = max(1, most // row)
    for start in range(copy.box.start[dim], copy.box.stop[dim], step):
        begin, end = list(copy.box.start), list(copy.box.stop)
        begin[dim], end[dim] = start, min(start + step, end[dim])
        box = Box(tuple(begin), tuple(end))
        yield from _split(replace(copy, source=copy.source.part(box), target=copy.target.part(box)), most)


def _itemsize(tensor: TensorSpec, itemsize: int) -> int:
    return 4 if tensor.float32 else itemsize


def _encoded(copy: Copy, bucket: int) -> bytes:
    """The copy as bytes, for the digest."""
    numbers = (copy.source_rank, copy.target_rank, bucket, copy.source.chunk, *copy.box.start, *copy.box.stop)
    places = (*copy.source.local_start, *copy.target.local_start)
    names = f"{copy.tensor.name}\0{copy.source.local_name}\0{copy.target.local_name}\0"
    return names.encode() + struct.pack(f"<{len(numbers) + len(places)}q", *numbers, *places)

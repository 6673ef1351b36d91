"""Places of one rank's blocks in its staging memory, the messages that they form, and that memory.

Staging memory is CPU memory that a GPU copies from and to directly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.parallel import pinned_memory
from rlhpc.reshard.executor import get, put, wire_dtype
from rlhpc.reshard.plan import Copy, size_of
from rlhpc.reshard.staged.plan import Buckets, StagedPlan
from rlhpc.sharding.shards import Box, Shard, TensorSpec

_Key = tuple[TensorSpec, str, int]  # a tensor's part in one parameter
_REMEDY = "raise it: weights are staged in CPU memory (placement: separate); or fewer ranks of a node generate"


@dataclass(frozen=True)
class StagedBlock:
    """A block of this rank's parameters, and its bytes in staging memory."""

    shard: Shard
    start: int
    size: int


@dataclass(frozen=True)
class MessagePart:
    """A box inside a staged block, and its bytes in a message."""

    block: StagedBlock
    box: Box
    size: int

    @property
    def is_whole(self) -> bool:
        return self.box == self.block.shard.box


@dataclass(frozen=True)
class Message:
    """Blocks that go to or come from one rank in one bucket. ``start``: its place in staging memory; None if its parts
    must be packed."""

    peer: int
    parts: tuple[MessagePart, ...]
    size: int
    start: int | None


Messages = tuple[tuple[Message, ...], ...]  # of each bucket


@dataclass(frozen=True)
class SourceLayout:
    """Staging memory of a trainers' rank: each block that it sends, once."""

    blocks: tuple[StagedBlock, ...]
    size: int
    sends: Messages


@dataclass(frozen=True)
class TargetLayout:
    """Staging memory of one version on an engine's rank: messages from trainers (``receives``) and from other ranks of
    the node (``takes``) as they arrive. ``forwards``: what it sends to those."""

    blocks: tuple[StagedBlock, ...]
    size: int
    receives: Messages
    takes: Messages
    forwards: Messages


def source_layout(plan: StagedPlan, rank: int, itemsize: int) -> SourceLayout:
    """Layout of a trainers' rank, in the order in which blocks are first sent."""
    buckets = plan.between(plan.syncs, source=rank)
    staged = _staged_boxes(copy for bucket in buckets for copies in bucket.values() for copy in copies)
    blocks: dict[tuple[_Key, Box], StagedBlock] = {}
    size = 0
    for copy in _in_order(buckets):
        box = _around(copy.box, staged[_key(copy.source)])
        if (_key(copy.source), box) not in blocks:
            block = StagedBlock(copy.source.part(box), size, box.volume * size_of(copy.tensor, itemsize))
            blocks[_key(copy.source), box] = block
            size += block.size

    def part(copy: Copy) -> MessagePart:
        block = blocks[_key(copy.source), _around(copy.box, staged[_key(copy.source)])]
        return MessagePart(block, copy.box, copy.box.volume * size_of(copy.tensor, itemsize))

    sends = tuple(tuple(_message(peer, map(part, copies)) for peer, copies in bucket.items()) for bucket in buckets)
    return SourceLayout(tuple(blocks.values()), size, sends)


def target_layout(plan: StagedPlan, rank: int, itemsize: int) -> TargetLayout:
    """Layout of an engine's rank, in the order in which blocks arrive."""
    blocks: list[StagedBlock] = []
    size = 0

    def arriving(bucket: Mapping[int, Sequence[Copy]]) -> Iterator[Message]:
        nonlocal size
        for peer, copies in bucket.items():
            parts = []
            for copy in copies:
                block = StagedBlock(copy.target, size, copy.box.volume * size_of(copy.tensor, itemsize))
                parts.append(MessagePart(block, copy.box, block.size))
                blocks.append(block)
                size += block.size
            yield _message(peer, parts)

    syncs, forwards = (plan.between(copies, target=rank) for copies in (plan.syncs, plan.forwards))
    receives, takes = [], []
    for received, taken in zip(syncs, forwards, strict=True):
        receives.append(tuple(arriving(received)))
        takes.append(tuple(arriving(taken)))
    by_tensor: dict[TensorSpec, list[StagedBlock]] = defaultdict(list)
    for bucket in receives:
        for message in bucket:
            for each in message.parts:
                by_tensor[each.block.shard.tensor].append(each.block)

    def part(copy: Copy) -> MessagePart:
        block = next(b for b in by_tensor[copy.tensor] if b.shard.box.meet(copy.box) == copy.box)
        return MessagePart(block, copy.box, copy.box.volume * size_of(copy.tensor, itemsize))

    passed = plan.between(plan.forwards, source=rank)
    sends = tuple(tuple(_message(peer, map(part, copies)) for peer, copies in bucket.items()) for bucket in passed)
    return TargetLayout(tuple(blocks), size, tuple(receives), tuple(takes), sends)


def _key(shard: Shard) -> _Key:
    return shard.tensor, shard.local_name, shard.chunk


def _in_order(buckets: Buckets) -> Iterator[Copy]:
    return (copy for bucket in buckets for copies in bucket.values() for copy in copies)


def _message(peer: int, parts: Iterable[MessagePart]) -> Message:
    parts, size = tuple(parts), 0
    contiguous = True
    for part in parts:
        contiguous &= part.is_whole and part.block.start == parts[0].block.start + size
        size += part.size
    return Message(peer, parts, size, parts[0].block.start if contiguous else None)


def _staged_boxes(copies: Iterable[Copy]) -> dict[_Key, list[Box]]:
    """Boxes to stage: those that are sent, and where they overlap one around them, unless it is larger than they."""
    boxes: dict[_Key, dict[Box, None]] = defaultdict(dict)
    for copy in copies:
        boxes[_key(copy.source)][copy.box] = None
    return {key: _merged(list(found)) for key, found in boxes.items()}


def _merged(boxes: list[Box]) -> list[Box]:
    clusters: list[tuple[Box, list[Box]]] = []
    for box in boxes:
        hull, inside = box, [box]
        while met := [cluster for cluster in clusters if cluster[0].meet(hull) is not None]:
            clusters = [cluster for cluster in clusters if cluster not in met]
            for other, members in met:
                hull, inside = _hull(hull, other), inside + members
        clusters.append((hull, inside))
    return [
        box
        for hull, inside in clusters
        for box in ([hull] if hull.volume <= sum(member.volume for member in inside) else inside)
    ]


def _hull(first: Box, second: Box) -> Box:
    return Box(tuple(map(min, first.start, second.start)), tuple(map(max, first.stop, second.stop)))


def _around(box: Box, staged: Sequence[Box]) -> Box:
    """The staged box that contains this one."""
    return next(found for found in staged if found.meet(box) == box)


class StagingMemory:
    """Memory of one version. On a CPU pages are taken when they are first written."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = pinned_memory.allocate(size, device, "slurm.memory", _REMEDY)
        self._dtype = dtype

    def put(self, block: StagedBlock, weights: Tensor) -> None:
        """Writes a block, converted to the dtype that it is sent in."""
        put(self._bytes(block.start, block.size), weights, wire_dtype(block.shard.tensor, self._dtype))

    def get(self, block: StagedBlock) -> Tensor:
        """The block."""
        dtype = wire_dtype(block.shard.tensor, self._dtype)
        return get(self._bytes(block.start, block.size), block.shard.box.shape, dtype)

    def place(self, message: Message) -> Tensor:
        """Bytes of a message that is stored in one piece."""
        assert message.start is not None, "its parts must be packed"
        return self._bytes(message.start, message.size)

    def packed(self, message: Message, buffer: Tensor) -> Tensor:
        """The bytes of a message: those stored, or packed into ``buffer``, which is as large."""
        if message.start is not None:
            return self.place(message)
        start = 0
        for part in message.parts:
            shard = part.block.shard
            inside = tuple(
                slice(a - b, c - b) for a, b, c in zip(part.box.start, shard.box.start, part.box.stop, strict=True)
            )
            block, dtype = self.get(part.block), wire_dtype(shard.tensor, self._dtype)
            put(buffer[start : start + part.size], block[inside], dtype)
            start += part.size
        return buffer

    def _bytes(self, start: int, size: int) -> Tensor:
        return self._memory[start : start + size]


def buffer_bytes(messages: Messages, *, at_once: bool) -> int:
    """Bytes to pack the messages of a bucket: all ``at_once``, or one after another."""
    sizes = ([message.size for message in bucket if message.start is None] for bucket in messages)
    return max((sum(found) if at_once else max(found) for found in sizes if found), default=0)

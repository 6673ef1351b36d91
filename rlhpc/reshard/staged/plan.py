"""Plan of a weight sync between disjoint ranks: the rank of a node that receives each block, and its forwards.

Each block that a node's engines need crosses the network to that node once. Of the ranks that need it, the one that
receives the fewest bytes gets it and forwards it to the others. Pure: equal on all ranks, compared by its digest.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhpc.reshard.plan import Copy, ReshardPlan, Side, cells_of, encoded, plan_reshard, size_of
from rlhpc.reshard.sides import SyncSides
from rlhpc.sharding.shards import Box, Shard, TensorSpec

STAGED_VERSIONS = 2  # versions in an engine rank's staging memory: a complete one and one that arrives
# With deltas, a trainers' rank keeps the last version too; and it packs its messages and one of the last version, for
# which it holds deltas in pieces and whole. An engine's rank has a buffer for deltas.
_TRAINER_BUCKETS, _ENGINE_BUCKETS = 4, 2

Buckets = list[dict[int, list[Copy]]]  # of each bucket, the copies by the rank at the other end


@dataclass(frozen=True)
class StagedTraffic:
    """Bytes that one rank sends and receives: from trainers to engines, some of them ``across`` nodes, and between the
    ranks of engines on one node."""

    sent: int = 0
    sent_across: int = 0
    received: int = 0
    received_across: int = 0
    forwarded: int = 0
    taken: int = 0


@dataclass(frozen=True)
class StagedPlan:
    """``syncs`` from trainers to engines, and ``forwards`` between engines of a node, each in the bucket in which its
    block arrives. They are those of the requested rank: a trainers' own syncs, or an engine's whole node."""

    syncs: tuple[Copy, ...]
    forwards: tuple[Copy, ...]
    num_buckets: int
    bucket_bytes: int
    largest_bucket: int  # maximum bytes that a rank sends to engines, or receives from trainers, in one bucket
    traffic: Mapping[int, StagedTraffic]  # of every rank of either side
    staging: Mapping[int, int]  # maximum bytes of staging memory and buffers of every rank
    heralds: Mapping[int, int]  # the trainers' rank that sends the checksums to each engine rank
    digest: str  # over both sides and all ranks' copies

    def between(self, copies: Iterable[Copy], *, source: int | None = None, target: int | None = None) -> Buckets:
        """The copies from ``source`` or to ``target``, by bucket, then by the other rank, in the plan's order."""
        buckets: Buckets = [defaultdict(list) for _ in range(self.num_buckets)]
        for copy in copies:
            if source in (None, copy.source_rank) and target in (None, copy.target_rank):
                buckets[copy.bucket][copy.source_rank if source is None else copy.target_rank].append(copy)
        return [{peer: bucket[peer] for peer in sorted(bucket)} for bucket in buckets]


def plan_staged_sync(
    sides: SyncSides,
    *,
    ranks_per_node: int,
    bucket_bytes: int,
    itemsize: int,
    rank: int | None = None,
    delta: str = "off",
) -> StagedPlan:
    """The plan; with ``rank``, the copies that this rank needs to know. No trainers' rank sends, and no engine rank
    receives from trainers, more than ``bucket_bytes`` in one bucket. No rank is on both sides. ``delta``: as in the
    section reshard; it changes no copy."""
    assert not set(sides.source) & set(sides.target), "a rank both trains and generates"
    shares = _shares(sides.target, ranks_per_node, itemsize)
    first = {rank: share.first for rank, share in shares.items()}
    plan = plan_reshard(
        sides.source,
        first,
        ranks_per_node=ranks_per_node,
        bucket_bytes=bucket_bytes,
        itemsize=itemsize,
        keep=None if rank is None else _neighbors(sides, rank, ranks_per_node),
    )
    trainers = sorted(sides.source)
    return StagedPlan(
        syncs=plan.copies,
        forwards=() if rank in sides.source else tuple(_forwards(plan.copies, sides.target, ranks_per_node)),
        num_buckets=plan.num_buckets,
        bucket_bytes=bucket_bytes,
        largest_bucket=plan.largest_bucket,
        traffic={rank: _traffic(plan, shares, rank) for rank in sides.ranks},
        staging=_staging(plan, sides, itemsize, deltas=delta != "off"),
        heralds={rank: trainers[place % len(trainers)] for place, rank in enumerate(sorted(sides.target))},
        digest=_digest(plan, sides.target, delta),
    )


@dataclass(frozen=True)
class _Share:
    """Blocks that one rank of a node receives from trainers, and bytes that it forwards to others and takes."""

    first: list[Shard]
    forwarded: int
    taken: int


def _shares(target: Side, ranks_per_node: int, itemsize: int) -> dict[int, _Share]:
    """Each engine rank's share of what its node needs. Nodes whose ranks need the same have the same list objects."""
    known: dict[tuple[int, ...], list[_Share]] = {}
    found: dict[int, _Share] = {}
    for _, ranks in _nodes(target, ranks_per_node):
        key = tuple(id(target[rank]) for rank in ranks)
        if key not in known:
            known[key] = _share_out([target[rank] for rank in ranks], itemsize)
        found.update(zip(ranks, known[key], strict=True))
    return found


def _share_out(needs: Sequence[Sequence[Shard]], itemsize: int) -> list[_Share]:
    """Divides what the ranks of a node need: blocks that only one needs first, then the others, largest first, each to
    the rank that has received the fewest bytes of those that need it."""
    cells = list(_cells(needs, itemsize))
    loads, forwarded, taken = ([0] * len(needs) for _ in range(3))
    selected: list[list[tuple[int, Shard]]] = [[] for _ in needs]
    for number in sorted(range(len(cells)), key=lambda n: (len(cells[n].parts) > 1, -cells[n].size, n)):
        cell = cells[number]
        place = min(cell.parts, key=lambda place: (loads[place], place))
        loads[place] += cell.size
        forwarded[place] += cell.size * (len(cell.parts) - 1)
        for other in cell.parts.keys() - {place}:
            taken[other] += cell.size
        selected[place].append((number, cell.parts[place]))
    first = ([shard for _, shard in sorted(shards, key=lambda found: found[0])] for shards in selected)
    return [_Share(*share) for share in zip(first, forwarded, taken, strict=True)]


@dataclass(frozen=True)
class _Cell:
    """A block that the same ranks of a node need, by place in the node, and its bytes."""

    size: int
    parts: dict[int, Shard]


def _cells(needs: Sequence[Sequence[Shard]], itemsize: int) -> Iterator[_Cell]:
    """Disjoint blocks that the ranks need, in the order of the model's tensors."""
    tensors: dict[TensorSpec, dict[Box, dict[int, Shard]]] = {}
    for place, shards in enumerate(needs):
        for shard in shards:
            ranks = tensors.setdefault(shard.tensor, {}).setdefault(shard.box, {})
            assert place not in ranks, f"a rank holds {shard.box} of {shard.tensor.name} twice"
            ranks[place] = shard
    for tensor, by_box in tensors.items():
        boxes = sorted(by_box, key=_corner)
        for cell, inside in cells_of(boxes):
            parts = {place: s.part(cell) for index in inside for place, s in by_box[boxes[index]].items()}
            yield _Cell(cell.volume * size_of(tensor, itemsize), parts)


def _forwards(syncs: Iterable[Copy], target: Side, ranks_per_node: int) -> Iterator[Copy]:
    """Copies of received blocks to the other ranks of the node that need them."""
    needs: dict[tuple[int, TensorSpec], list[tuple[int, Shard]]] = defaultdict(list)
    nodes = {copy.target_rank // ranks_per_node for copy in syncs}
    for rank in sorted(target):
        if rank // ranks_per_node in nodes:
            for shard in target[rank]:
                needs[rank // ranks_per_node, shard.tensor].append((rank, shard))
    for copy in syncs:
        for rank, shard in needs[copy.target_rank // ranks_per_node, copy.tensor]:
            part = shard.box.meet(copy.box) if rank != copy.target_rank else None
            if part is not None:
                yield Copy(copy.target_rank, rank, copy.target.part(part), shard.part(part), copy.bucket)


def _nodes(side: Side, ranks_per_node: int) -> list[tuple[int, list[int]]]:
    """The side's ranks on each node, ascending."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(side):
        nodes[rank // ranks_per_node].append(rank)
    return list(nodes.items())


def _neighbors(sides: SyncSides, rank: int, ranks_per_node: int) -> list[int]:
    """The engine ranks on this one's node; a trainers' rank alone."""
    if rank in sides.source:
        return [rank]
    return [other for other in sides.target if other // ranks_per_node == rank // ranks_per_node]


def _traffic(plan: ReshardPlan, shares: Mapping[int, _Share], rank: int) -> StagedTraffic:
    found, share = plan.traffic[rank], shares.get(rank)
    moved = (share.forwarded, share.taken) if share else (0, 0)
    return StagedTraffic(found.sent, found.sent_across, found.received, found.received_across, *moved)


def _staging(plan: ReshardPlan, sides: SyncSides, itemsize: int, *, deltas: bool) -> dict[int, int]:
    """Trainers stage each block that they send once, and with deltas twice, engines what they need, and each has
    buckets to pack."""
    lists = {id(shards): shards for side in (sides.source, sides.target) for shards in side.values()}
    sizes = {key: sum(s.box.volume * size_of(s.tensor, itemsize) for s in shards) for key, shards in lists.items()}
    kept = {rank: min(sizes[id(shards)], plan.traffic[rank].sent) for rank, shards in sides.source.items()}
    kept |= {rank: STAGED_VERSIONS * sizes[id(shards)] for rank, shards in sides.target.items()}
    buckets = dict.fromkeys(sides.source, _TRAINER_BUCKETS) | dict.fromkeys(sides.target, _ENGINE_BUCKETS)
    found = {}
    for rank, size in kept.items():
        bucket, copies = min(size, plan.bucket_bytes), 2 if deltas and rank in sides.source else 1
        found[rank] = copies * size + (buckets[rank] if deltas else 1) * bucket
    return found


def _digest(plan: ReshardPlan, target: Side, delta: str) -> str:
    """The plan's digest, which follows from source and shares, together with the engines' needs and ``delta``."""
    digest = hashlib.blake2b(plan.digest.encode(), digest_size=16)
    if delta != "off":
        digest.update(delta.encode())
    lists = {id(shards): encoded(shards) for shards in target.values()}
    for rank in sorted(target):
        digest.update(lists[id(target[rank])])
    return digest.hexdigest()


def _corner(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start, box.stop

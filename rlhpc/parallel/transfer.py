"""Transfers of work and its results between models with different layouts. Collective over the whole job.

HybridFlow (arXiv 2409.19256, table 3) calls these patterns transfer protocols: they define the ranks that receive the
same part of a list, and the one of them that sends the result.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from rlhpc.parallel.store import opened, seal
from rlhpc.sharding.layout import ParallelLayout

T = TypeVar("T")
_MESSAGE = 1 << 28  # bytes of a broadcast: gloo counts in int, and heartbeats must not wait


def gather_objects(mine: T | None) -> list[T | None]:
    """Every rank's object on every rank, through CPU memory; None from ranks without one.

    Unlike ``all_gather_object``, which allocates the size of the largest object for each rank: the objects of a few
    engines' first ranks would take as much memory as if every rank had one.
    """
    own = torch.empty(0, dtype=torch.uint8)
    if mine is not None:
        own = torch.frombuffer(bytearray(seal(pickle.dumps(mine))), dtype=torch.uint8)
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = own.numel()
    dist.all_reduce(sizes)
    found: list[T | None] = []
    for rank, size in enumerate(sizes.tolist()):
        if rank == dist.get_rank():
            found.append(mine)
            _broadcast(own, rank)
        elif size:
            arriving = torch.empty(size, dtype=torch.uint8)
            _broadcast(arriving, rank)
            found.append(pickle.loads(opened(arriving.numpy().tobytes())))
        else:
            found.append(None)
    return found


def _broadcast(content: torch.Tensor, speaker: int) -> None:
    for message in content.split(_MESSAGE) if len(content) else ():
        dist.broadcast(message, src=speaker)


def gather_parts(transfer: Transfer, layout: ParallelLayout, mine: T) -> list[T]:
    """Every part's value on every rank, in order of parts; one rank of each part sends it."""
    speakers = [transfer.speaker(layout, part) for part in range(transfer.parts(layout))]
    sent = gather_objects(mine if dist.get_rank() in speakers else None)
    return [sent[rank] for rank in speakers]  # type: ignore[misc]


def one_to_all(value: T, speaker: int = 0) -> T:
    """Value of rank ``speaker`` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=speaker)
    return box[0]


def give_parts(transfer: Transfer, layout: ParallelLayout, mine: Mapping[int, T]) -> dict[int, T]:
    """Sends a value to all ranks of each part in ``mine``; returns the received values by sending rank."""
    parts = ((rank, transfer.part_of(layout, rank)) for rank in range(layout.world_size))
    return give_objects({rank: mine[part] for rank, part in parts if part in mine})


def give_objects(mine: Mapping[int, T]) -> dict[int, T]:
    """Sends an object to each rank in ``mine``, through CPU memory; returns the received objects by sending rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gives = torch.zeros(ranks, ranks, dtype=torch.uint8)
    gives[rank, list(mine)] = 1
    dist.all_reduce(gives)
    found = {rank: mine[rank]} if rank in mine else {}
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        arriving = _swap(mine[to] if gives[rank, to] else None, to, source if gives[source, rank] else None)
        if arriving is not None:
            found[source] = pickle.loads(opened(arriving.numpy().tobytes()))
    return found


def _swap(leaving: object | None, to: int, source: int | None) -> torch.Tensor | None:
    """Sends to one rank and receives the bytes that another one, if any, sends to this one."""
    own = None if leaving is None else torch.frombuffer(bytearray(seal(pickle.dumps(leaving))), dtype=torch.uint8)
    size = torch.zeros(1, dtype=torch.int64)
    _pass(None if own is None else torch.tensor([own.numel()]), to, None if source is None else size, source)
    arriving = None if source is None else torch.empty(int(size), dtype=torch.uint8)
    _pass(own, to, arriving, source)
    return arriving


def _pass(own: torch.Tensor | None, to: int, arriving: torch.Tensor | None, source: int | None) -> None:
    works = [dist.isend(message, to) for message in own.split(_MESSAGE)] if own is not None else []
    if arriving is not None:
        works += [dist.irecv(message, source) for message in arriving.split(_MESSAGE)]
    for work in works:
        work.wait()


@dataclass(frozen=True)
class Transfer:
    """Gives ranks that differ along ``axes``, the first one slowest, different parts; other ranks share a part."""

    name: str
    axes: tuple[str, ...]

    def parts(self, layout: ParallelLayout) -> int:
        """Number of parts."""
        count = 1
        for axis in self.axes:
            count *= layout.size(axis)
        return count

    def part_of(self, layout: ParallelLayout, rank: int) -> int:
        """Index of the rank's part."""
        part, coord = 0, layout.coord(rank)
        for axis in self.axes:
            part = part * layout.size(axis) + coord[axis]
        return part

    def speaker(self, layout: ParallelLayout, part: int) -> int:
        """First rank of a part, which sends its result: all its ranks have the same."""
        return next(rank for rank in range(layout.world_size) if self.part_of(layout, rank) == part)


SPLIT_BY_DATA = Transfer("split_by_data", ("dp",))  # training: ranks of one model copy take the same batches
PIPELINE_AS_DATA = Transfer("pipeline_as_data", ("dp", "pp"))  # generation: each stage has a whole engine

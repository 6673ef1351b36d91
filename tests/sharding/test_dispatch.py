"""Every object reaches the ranks that it is meant for."""

from __future__ import annotations

import random

import pytest

from rlhpc.parallel import transfer
from rlhpc.parallel.transfer import (
    PIPELINE_AS_DATA,
    SPLIT_BY_DATA,
    Transfer,
    gather_objects,
    gather_parts,
    give_objects,
    one_to_all,
)
from rlhpc.sharding.layout import ParallelLayout
from tests.helpers.distributed import run_ranks

ALL = (SPLIT_BY_DATA, PIPELINE_AS_DATA)


def layouts() -> list[ParallelLayout]:
    rng = random.Random(0)
    found = []
    for _ in range(60):
        tp, pp, cp, dp = (rng.choice((1, 2, 3, 4)) for _ in range(4))
        found.append(ParallelLayout(world_size=tp * pp * cp * dp, tp=tp, pp=pp, cp=cp))
    return found


@pytest.mark.parametrize("transfer", ALL, ids=lambda transfer: transfer.name)
def test_each_part_has_as_many_ranks_and_the_first_of_them_speaks(transfer: Transfer) -> None:
    for layout in layouts():
        parts = [transfer.part_of(layout, rank) for rank in range(layout.world_size)]
        assert sorted(set(parts)) == list(range(transfer.parts(layout))), layout
        assert len({parts.count(part) for part in parts}) == 1, layout
        for part in set(parts):
            assert transfer.speaker(layout, part) == parts.index(part)


def test_which_ranks_share() -> None:
    """Of two copies of a model in two stages of two ranks each: tp is the innermost axis, pp the outermost."""
    layout = ParallelLayout(world_size=8, tp=2, pp=2)
    assert [SPLIT_BY_DATA.part_of(layout, rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [PIPELINE_AS_DATA.part_of(layout, rank) for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]


@pytest.mark.ranks
def test_ranks_receive_what_the_others_send() -> None:
    """An object of one rank for all takes its own room, not as much for each rank."""
    for rank, (back, value, gathered, room, given) in enumerate(run_ranks(_share_and_gather, 4)):
        assert back == [[0], [0, 1]]
        assert value == "rank 2"
        assert gathered == [None, 150, "rank 2", None]
        assert room < 2.5 * _LARGE
        assert given == {source: (3_000_000, 10 * source + rank) for source in range(4) if source + rank in (2, 3)}


_LARGE = 48 << 20


def _share_and_gather() -> tuple[list[list[int]], str, list[object], int, dict[int, tuple[int, int]]]:
    import resource

    import numpy as np
    import torch.distributed as dist

    layout, rank = ParallelLayout(world_size=4, tp=2, pp=2), dist.get_rank()
    back = [gather_parts(t, layout, t.part_of(layout, rank)) for t in ALL]
    value = one_to_all(f"rank {rank}", speaker=2)
    transfer._MESSAGE = 10_000_000  # the large one in several messages, the last one shorter
    mine = {1: np.full(_LARGE // 4, 150, dtype=np.int32), 2: f"rank {rank}"}.get(rank)
    gather_objects("all ranks are here")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = gather_objects(mine)
    room = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert found[1].size == _LARGE // 4
    found[1] = int(found[1].mean())
    mine = {to: np.full(3_000_000, 10 * rank + to, dtype=np.int32) for to in range(4) if rank + to in (2, 3)}
    given = {source: (len(values), int(values.mean())) for source, values in give_objects(mine).items()}
    return back, value, found, room, given

"""Two worlds in one job: collectives of each, and the board, pairs and channels between them."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.core.rank import RankInfo
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.ranks


def work_in_a_role() -> dict[str, Any]:
    """Groups of the same names in both worlds, and what passes between them."""
    import torch
    import torch.distributed as dist

    from rlhpc.parallel.board import Board
    from rlhpc.parallel.groups import job_store

    info = RankInfo.from_environ()
    found: dict[str, Any] = {"info": (info.role, info.rank, info.world_size, info.job_rank, info.job_size)}
    found["world"] = (dist.get_rank(), dist.get_world_size())
    sums = []
    for _ in range(3):
        group, total = dist.new_group(list(range(info.world_size)), backend="gloo"), torch.tensor([2**info.job_rank])
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    found["sums"] = sums
    board = Board(job_store())
    board.post(f"rank/{info.job_rank}", {"role": info.role})
    found["waited"] = [board.wait_for(f"rank/{rank}", 20)["role"] for rank in range(info.job_size)]
    found["read"] = sorted(board.read(["rank/0", "rank/2", "rank/7"]))
    found["place"] = info.place
    return found


def test_each_role_has_a_world_of_its_own_in_one_job():
    found = run_ranks(work_in_a_role, 3, roles=(2, 1))
    assert [rank["info"] for rank in found] == [
        ("trainers", 0, 2, 0, 3),
        ("trainers", 1, 2, 1, 3),
        ("engines", 0, 1, 2, 3),
    ]
    assert [rank["world"] for rank in found] == [(0, 2), (1, 2), (0, 1)]
    assert [rank["sums"] for rank in found] == [[0b11] * 3, [0b11] * 3, [0b100] * 3]
    assert [rank["waited"] for rank in found] == [["trainers", "trainers", "engines"]] * 3
    assert [rank["read"] for rank in found] == [["rank/0", "rank/2"]] * 3
    assert len({rank["place"] for rank in found}) == 1


def exchange() -> Any:
    """Objects of one channel for each engine, both ways."""
    from rlhpc.parallel.channel import Inbox, open_channel
    from rlhpc.parallel.groups import job_store

    info, inbox, engines = RankInfo.from_environ(), Inbox(), (1, 2)
    ends = [(0, info.job_rank)] if info.role == "engines" else [(0, rank) for rank in engines]
    channels = [open_channel(job_store(), str(pair[1]), pair, info.job_rank, inbox, timeout=20) for pair in ends]
    for number in range(20):
        for channel in channels:
            channel.send({"from": info.job_rank, "number": number, "bytes": b"x" * (number * 1_000_000)})
    found: dict[int, list[int]] = {}
    while sum(map(len, found.values())) < 20 * len(channels):
        assert inbox.wait(20)
        for peer, value in inbox.take():
            assert value["from"] == peer
            assert len(value["bytes"]) == value["number"] * 1_000_000
            found.setdefault(peer, []).append(value["number"])
    for channel in channels:
        channel.close()
    return found


def test_channels_carry_objects_in_order_both_ways():
    numbers = list(range(20))
    assert run_ranks(exchange, 3, roles=(1, 2)) == [{1: numbers, 2: numbers}, {0: numbers}, {0: numbers}]

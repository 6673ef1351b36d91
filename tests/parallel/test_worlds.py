"""Two worlds in one job: collectives of each, and the board, pairs and channels between them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhpc.core.errors import PeerLost
from rlhpc.core.exits import classify
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox, open_channel, open_channel_of_expendable, open_expendable_channel
from rlhpc.parallel.groups import job_store, join, last_collectives
from rlhpc.parallel.pairs import JobGroup, PairLimits, open_group, open_pair
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.ranks
LARGE = 100_000_000  # bytes: more than a message of a channel


def meet_without_a_store(trainers: int) -> tuple[tuple, list[int]]:
    """As under torchrun: at MASTER_ADDR and MASTER_PORT."""
    whole = RankInfo.from_environ()
    role = ("engines", trainers, whole.world_size - trainers) if whole.rank >= trainers else ("trainers", 0, trainers)
    join(whole.in_role(*role), timeout_minutes=0.5)
    info, total = RankInfo.from_environ(), torch.tensor([2**whole.rank])
    dist.all_reduce(total)
    if info.rank == 0:
        channel = open_channel(job_store(), "ends", (0, trainers), info.job_rank, timeout=20)
        channel.send(total.tolist())
        assert channel.inbox.wait(20)
        assert [peer for peer, _ in channel.inbox.take()] == [trainers - info.job_rank]
        channel.close()
    board = Board(job_store())
    board.post(f"ended/{info.job_rank}", 1)
    for rank in range(info.job_size if not info.job_rank else 0):  # the store is rank 0's
        board.wait_for(f"ended/{rank}", 20)
    return (info.role, info.rank, info.world_size, info.job_rank, info.job_size), total.tolist()


def test_roles_meet_without_a_store_of_the_job():
    found = run_ranks(meet_without_a_store, 3, 2, join=False)
    assert found == [
        (("trainers", 0, 2, 0, 3), [0b11]),
        (("trainers", 1, 2, 1, 3), [0b11]),
        (("engines", 0, 1, 2, 3), [0b100]),
    ]


def work_in_a_role() -> dict[str, Any]:
    """Groups of the same names in both worlds, and what passes between them."""
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
    found = run_ranks(work_in_a_role, 4, roles=(2, 2), timeout=60)
    assert [rank["info"] for rank in found] == [
        ("trainers", 0, 2, 0, 4),
        ("trainers", 1, 2, 1, 4),
        ("engines", 0, 2, 2, 4),
        ("engines", 1, 2, 3, 4),
    ]
    assert [rank["world"] for rank in found] == [(0, 2), (1, 2)] * 2
    assert [rank["sums"] for rank in found] == [[0b11] * 3] * 2 + [[0b1100] * 3] * 2
    assert [rank["waited"] for rank in found] == [["trainers"] * 2 + ["engines"] * 2] * 4
    assert [rank["read"] for rank in found] == [["rank/0", "rank/2"]] * 4
    assert len({rank["place"] for rank in found}) == 1


def exchange() -> Any:
    """Objects of one channel for each engine, both ways."""
    info, inbox, engines = RankInfo.from_environ(), Inbox(), (1, 2)
    ends = [(0, info.job_rank)] if info.role == "engines" else [(0, rank) for rank in engines]
    channels = [open_channel(job_store(), str(pair[1]), pair, info.job_rank, inbox, timeout=20) for pair in ends]
    large, sizes, send = np.arange(LARGE, dtype=np.uint8), [], JobGroup.send

    def send_counted(group: JobGroup, tensor: Any, *rest: Any) -> Any:
        sizes.append(tensor.nbytes)
        return send(group, tensor, *rest)

    JobGroup.send = send_counted
    for number in range(20):
        for channel in channels:
            channel.send(
                {"from": info.job_rank, "number": number, "large": large if number == info.job_rank == 1 else None}
            )
    large[:] = 0  # an object travels as it was when it was sent
    found: dict[int, list[int]] = {}
    while sum(map(len, found.values())) < 20 * len(channels):
        assert inbox.wait(20)
        for peer, value in inbox.take():
            assert value["from"] == peer
            if value["number"] == peer == 1:
                assert np.array_equal(value["large"], np.arange(LARGE, dtype=np.uint8))
            found.setdefault(peer, []).append(value["number"])
    assert inbox.sizes() == (0, 0)
    assert not inbox.wait(0.01)
    for channel in channels:
        channel.close()
        assert channel.backlog == 0
        with pytest.raises(PeerLost, match="has closed its end"):
            channel.send(1)
    largest = max(sizes)  # bytes of a message
    assert largest == 16 << 20 if info.job_rank == 1 else largest < 1000
    return found


def test_channels_carry_objects_in_order_both_ways():
    numbers = list(range(20))
    assert run_ranks(exchange, 3, roles=(1, 2)) == [{1: numbers, 2: numbers}, {0: numbers}, {0: numbers}]


def hang_in_the_default_group() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Groups of a rank after a collective of its world and one of a pair, as the analysis of a hang gets them."""
    info = RankInfo.from_environ()
    dist.all_reduce(torch.ones(1))
    pair = open_pair(job_store(), "weights", (1, 2), info.job_rank, timeout=20) if info.job_rank else None
    if pair is not None:
        pair.wait(pair.broadcast(torch.ones(3), 2))
    return [{"key": group.key, "ranks": group.ranks} for group in last_collectives()]


def test_the_last_collectives_name_the_role_and_the_job_s_ranks():
    trainers, engines = {"key": ("trainers/0", "gloo"), "ranks": (0, 1)}, {"key": ("engines/0", "gloo"), "ranks": (2,)}
    assert run_ranks(hang_in_the_default_group, 3, roles=(2, 1)) == [[trainers], [trainers], [engines]]


def beside_a_lost_peer(how: str, lost: int) -> float:
    """Rank ``lost`` of two sends an object and is killed or stopped; the other one calls ``take`` until it raises."""
    info = RankInfo.from_environ()
    timeout = 30 if how == "SIGKILL" else 2
    pair = open_pair(job_store(), "weights", (0, 1), info.job_rank, timeout=timeout)
    channel = open_channel(job_store(), "groups", (0, 1), info.job_rank, timeout=timeout)
    if how == "SIGSTOP":
        time.sleep(2.5)  # longer than the timeout: a channel without objects stays
    if info.job_rank == lost:
        channel.send((time.time(), os.getpid()))
        while channel.backlog:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.Signals[how])
    while not channel.inbox.wait(10):
        pass
    ((_, (began, process)),) = channel.inbox.take()

    def take_forever() -> None:
        while True:
            channel.inbox.take()
            time.sleep(0.01)

    with pytest.raises(PeerLost, match=f"lost rank {lost}") as raised:
        take_forever()
    seconds = time.time() - began
    assert classify(raised.value) == "peer"
    for call in (channel.inbox.check, lambda: channel.inbox.wait(1), lambda: channel.send(1), channel.close):
        with pytest.raises(PeerLost):
            call()
    if how == "SIGKILL":
        import torch

        def poll() -> None:
            work = pair.broadcast(torch.ones(3), lost)
            while not pair.finished(work):
                time.sleep(0.001)

        with pytest.raises(PeerLost, match=f"weights: lost rank {lost}"):
            poll()
    else:
        os.kill(process, signal.SIGKILL)
    return seconds


def poll_a_broadcast() -> tuple[int, list[float]]:
    """How often a rank had to ask for a broadcast in a group over both roles, and what it received."""
    info = RankInfo.from_environ()
    group, tensor = open_group(job_store(), "all", (2, 0, 1), info.job_rank, timeout=20), torch.zeros(1000)
    if info.job_rank == 1:
        time.sleep(0.2)
        tensor += 1
    work, polls = group.broadcast(tensor, root=1), 1
    while not group.finished(work):
        polls += 1
        time.sleep(0.01)
    group.close()
    return polls, tensor.unique().tolist()


def test_a_broadcast_over_both_roles_can_be_polled():
    found = run_ranks(poll_a_broadcast, 3, roles=(2, 1))
    assert [values for _, values in found] == [[1.0]] * 3
    assert found[0][0] > 5
    assert found[2][0] > 5


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_peer_is_noticed_within_a_second(lost):
    found = run_ranks(beside_a_lost_peer, 2, "SIGKILL", lost, roles=(1, 1), killed=[lost])
    assert found[lost] is None
    assert found[1 - lost] < 1


def test_a_stopped_peer_is_noticed_after_the_timeout():
    found = run_ranks(beside_a_lost_peer, 2, "SIGSTOP", 1, roles=(1, 1), killed=[1])
    assert 1 < found[0] < 4


def beside_an_expendable_peer(how: str) -> tuple[bool, float]:
    """Rank 1 of two says nothing for longer than the limit, sends an object and is killed or stopped; rank 0 goes on.
    Whether it was lost before, and the seconds until its loss was noted."""
    info, inbox, limits = RankInfo.from_environ(), Inbox(), PairLimits(silence=2.0)
    make = open_expendable_channel if info.job_rank == 0 else open_channel_of_expendable
    channel = make(job_store(), "groups", (0, 1), info.job_rank, inbox, limits)
    time.sleep(3)
    if info.job_rank == 1:
        channel.send((time.time(), os.getpid()))
        while channel.backlog:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.Signals[how])
    early = bool(inbox.gone())
    while not inbox.wait(10):
        pass
    ((_, (began, process)),) = inbox.take()
    while not (gone := inbox.gone()):
        assert inbox.take() == []
        assert time.time() < began + 10
        inbox.wait(0.05)
    seconds = time.time() - began
    assert [*gone] == [channel]
    channel.drop()
    inbox.check()
    assert inbox.take() == []
    if how == "SIGSTOP":
        os.kill(process, signal.SIGKILL)
    return early, seconds


@pytest.mark.parametrize(("how", "most"), [("SIGKILL", 1.0), ("SIGSTOP", 3.0)])
def test_work_goes_on_without_an_expendable_peer_whose_loss_is_noted(how, most):
    early, seconds = run_ranks(beside_an_expendable_peer, 2, how, roles=(1, 1), killed=[1])[0]
    assert not early
    assert seconds < most

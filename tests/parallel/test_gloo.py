"""Gloo groups beside another user's program that connects to each port at once and poses as every rank."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhpc.core import env
from rlhpc.core.rank import RankInfo
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.parallel import pairs
from rlhpc.parallel.channel import open_channel
from rlhpc.parallel.gloo import (
    Endpoint,
    Sighting,
    accept_silently,
    close_to_all,
    compare,
    hear,
    open_inodes,
    sends_data,
    sockets_except,
)
from rlhpc.parallel.groups import job_store, join, leave
from tests.helpers import stranger
from tests.helpers.distributed import run_ranks

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network")
GROUPS = 8  # in half of the pairs a rank that waits for another one listens; in the others it connects
PAIRS = 4  # between two roles
OURS = Endpoint("10.0.0.1", 5000)
ENDS = [Endpoint("10.0.0.2", port) for port in range(3)]


# ---- comparing connections


@pytest.mark.parametrize(
    ("accepted", "opened", "expected"),
    [
        ({ENDS[0]: True, ENDS[1]: True}, ENDS[:2], Sighting(3, ("10.0.0.1:5000",))),
        # A stranger that has no place changes nothing.
        ({ENDS[0]: True, ENDS[1]: False}, ENDS[:1], Sighting(3, ("10.0.0.1:5000",), ("10.0.0.2:1",))),
        ({ENDS[0]: False, ENDS[1]: True}, ENDS[:1], Sighting(3, ("10.0.0.1:5000",), ("10.0.0.2:1",), 1, 1)),
        ({ENDS[0]: False}, ENDS[:1], Sighting(3, ("10.0.0.1:5000",), (), 1)),  # a stranger that has left
        ({}, ENDS[:1], Sighting(3, ("10.0.0.1:5000",), (), 1)),
        ({ENDS[2]: True}, [], Sighting(3, ("10.0.0.1:5000",), ("10.0.0.2:2",), 0, 1)),
    ],
)
def test_each_rank_has_its_place_and_no_stranger_has_one(accepted, opened, expected):
    found = compare(3, [OURS], accepted, opened)
    assert found == expected
    assert found.whole == (not expected.lost and not expected.taken)


def test_a_report_names_addresses_and_ports():
    found = Sighting(0, ("10.0.0.1:5000",), tuple(f"10.0.0.9:{port}" for port in range(5)), 1, 2)
    assert found.describe() == (
        "5 connections to 10.0.0.1:5000 that no rank of this job opened, from 10.0.0.9:0, 10.0.0.9:1, 10.0.0.9:2"
        " and 2 more; places of ranks that were taken: 2"
    )


# ---- filters on sockets


@contextlib.contextmanager
def a_port() -> Iterator[tuple[socket.socket, frozenset[str]]]:
    known = open_inodes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, known


def connected(server: socket.socket, known: frozenset[str]) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(server.getsockname(), 5)
    accepted, _ = server.accept()
    accepted.settimeout(5)
    return client, accepted


def test_a_silent_port_drops_data_until_a_connection_is_heard():
    with a_port() as (server, known):
        accept_silently(sockets_except(known)[0])
        client, accepted = connected(server, known)
        with client, accepted:
            client.sendall(b"who")
            accepted.settimeout(0.5)
            with pytest.raises(TimeoutError):
                accepted.recv(3)
            accepted.settimeout(5)
            far = Endpoint(*client.getsockname())
            hear(next(sock for sock in sockets_except(known) if sock.remote == far))
            assert accepted.recv(3) == b"who"


def test_a_silent_stranger_can_leave():
    with a_port() as (server, known):
        accept_silently(sockets_except(known)[0])
        client, accepted = connected(server, known)
        client.close()
        with accepted:
            assert accepted.recv(1) == b""


def test_connections_before_the_filter_are_seen():
    with a_port() as (server, known):
        port = sockets_except(known)[0]
        assert not sends_data(port)
        with socket.create_connection(server.getsockname(), 5):
            assert sends_data(port)  # in the queue
            accepted, _ = server.accept()
            accept_silently(port)
            with accepted:
                assert not sends_data(port)
                early = [sock for sock in sockets_except(known) if sock.local == port.local and sock.remote]
                assert [sends_data(sock) for sock in early] == [True]
        client, accepted = connected(server, known)
        with client, accepted:
            far = Endpoint(*client.getsockname())
            assert not any(sends_data(sock) for sock in sockets_except(known) if sock.remote == far)


def test_a_closed_port_ignores_everyone_and_keeps_its_connections():
    with a_port() as (server, known):
        client, accepted = connected(server, known)
        with client, accepted:
            close_to_all(next(sock for sock in sockets_except(known) if sock.remote is None))
            with pytest.raises(TimeoutError):
                socket.create_connection(server.getsockname(), 0.5)
            client.sendall(b"still")
            assert accepted.recv(5) == b"still"


def test_a_descriptor_that_is_used_again_is_left_alone():
    with a_port() as (server, known), socket.create_server(("127.0.0.1", 0)) as other:
        old = next(sock for sock in sockets_except(known) if sock.descriptor == server.fileno())
        os.dup2(other.fileno(), old.descriptor)
        with pytest.raises(OSError, match="has been closed"):
            close_to_all(old)


# ---- groups of ranks


@contextlib.contextmanager
def attacked_network(file: Path) -> Iterator[tuple[subprocess.Popen[str], StoreServer]]:
    """A network with a stranger in it and the store of a job."""
    with subprocess.Popen(
        [sys.executable, stranger.__file__, str(file), "--net"], stdin=-1, stdout=-1, text=True
    ) as process:
        process.stdout.readline()
        opened: list[StoreServer] = []
        thread = threading.Thread(target=lambda: opened.append(open_store(process.pid)))
        thread.start()
        thread.join()
        try:
            yield process, opened[0]
        finally:
            opened[0].close()
            process.stdin.close()


def open_store(network: int) -> StoreServer:
    stranger.enter_network(network)
    return StoreServer.open(host="127.0.0.1")


def make_groups(network: int, verify: bool) -> tuple[list[object], str]:
    """What ranks received in several groups, and what they said. Rank 1 comes later, so that the ports of the others
    wait for it."""
    stranger.enter_network(network)
    for name in (env.MASTER_ADDR, env.MASTER_PORT):
        del os.environ[name]  # the helper's own rendezvous
    info, said, received = RankInfo.from_environ(), io.StringIO(), []
    ranks = list(range(info.world_size))
    with contextlib.redirect_stderr(said):
        time.sleep(0.2 * (info.rank == 1))
        join(info, timeout_minutes=0.5, verify_connections=verify)
        for number in range(GROUPS):
            time.sleep(0.2 * (info.rank == 1))
            group = dist.new_group(ranks, backend="gloo")
            objects = [None] * len(ranks)
            dist.all_gather_object(objects, {"rank": info.rank, "group": number}, group=group)
            box = [{"from": info.rank}]
            dist.broadcast_object_list(box, src=number % len(ranks), group=group)
            total = torch.full((5,), float(info.rank))
            dist.all_reduce(total, group=group)
            received.append((objects, box, total.tolist()))
        leave()
    return received, said.getvalue()


def exchange_between_roles(network: int) -> tuple[object, list[float], str]:
    """What a rank received by a channel and by pairs from the one rank of the other role, and what it said."""
    stranger.enter_network(network)
    for name in (env.MASTER_ADDR, env.MASTER_PORT):
        del os.environ[name]
    whole, said = RankInfo.from_environ(), io.StringIO()
    with contextlib.redirect_stderr(said):
        join(whole.in_role(("trainers", "engines")[whole.rank], whole.rank, 1), timeout_minutes=0.5)
        mine, weights, meet = whole.rank, [], pairs._meet
        for number in range(PAIRS):
            delay = 0.2 * (mine == number % 2)  # while the other one listens
            pairs._meet = lambda *arguments, delay=delay: (meet(*arguments), time.sleep(delay))
            pair, tensor = (
                pairs.open_pair(job_store(), f"{number}", (0, 1), mine, timeout=30),
                torch.tensor([float(mine)]),
            )
            pair.wait(pair.broadcast(tensor, 1))
            weights += tensor.tolist()
        channel = open_channel(job_store(), "groups", (0, 1), mine, timeout=30)
        channel.send({"from": mine})
        assert channel.inbox.wait(30)
        received = channel.inbox.take()
        channel.close()
        leave()
    return received, weights, said.getvalue()


@needs_root
@pytest.mark.ranks
def test_a_stranger_takes_no_place_in_a_pair_or_a_channel(tmp_path):
    with attacked_network(tmp_path / "ran") as (process, server):
        settings = {
            env.RLHPC_STORE: f"127.0.0.1:{server.port}",
            env.RLHPC_STORE_SECRET: server.secret.hex(),
            env.GLOO_SOCKET_IFNAME: "lo",
        }
        found = run_ranks(exchange_between_roles, 2, process.pid, join=False, environ=settings)
        process.stdin.close()
        report = json.loads(process.stdout.read())
    assert [received for received, *_ in found] == [[(1, {"from": 1})], [(0, {"from": 0})]]
    assert [weights for _, weights, _ in found] == [[1.0] * PAIRS] * 2
    assert not (tmp_path / "ran").exists()
    assert report["read"] == 0
    assert report["connections"] >= PAIRS
    assert "no rank of this job opened, from 127.0.0.1:" in "".join(said for *_, said in found)


def expected(ranks: int) -> list[object]:
    return [
        ([{"rank": r, "group": g} for r in range(ranks)], [{"from": g % ranks}], [float(sum(range(ranks)))] * 5)
        for g in range(GROUPS)
    ]


@needs_root
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [3, pytest.param(5, marks=pytest.mark.long)])
def test_a_stranger_takes_no_place_in_a_group(tmp_path, ranks):
    with attacked_network(tmp_path / "ran") as (process, server):
        settings = {
            env.RLHPC_STORE: f"127.0.0.1:{server.port}",
            env.RLHPC_STORE_SECRET: server.secret.hex(),
            env.GLOO_SOCKET_IFNAME: "lo",
        }
        found = run_ranks(make_groups, ranks, process.pid, True, join=False, environ=settings)
        process.stdin.close()
        report = json.loads(process.stdout.read())
    assert [received for received, _ in found] == [expected(ranks)] * ranks
    assert not (tmp_path / "ran").exists()
    assert report["read"] == 0
    assert report["connections"] >= GROUPS
    said = "".join(text for _, text in found)
    assert re.search(r"no rank of this job opened, from 127.0.0.1:\d+", said)
    assert "places of ranks that were taken: " in said

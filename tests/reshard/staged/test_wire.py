"""Bytes of a staged weight sync on the cable between two nodes, which are network namespaces of their own."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhpc.core import env
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.reshard.staged.target import WeightTarget
from tests.helpers.distributed import run_ranks
from tests.reshard.staged.bounds import network_lower_bound
from tests.reshard.staged.ends import Actor, Case, Engine, job_of
from tests.rewards.users import needs_root

pytestmark = [pytest.mark.ranks, needs_root]

# Two trainers on one node, two engines on the other, which both need the whole model.
CASE = Case("qwen2", 2, 2, per_node=2, vocab=20000, axes={"tp": 2}, verify="never")
HEADERS = 0.02  # share of a message's bytes
CABLES = ("cable0", "cable1")


@contextmanager
def two_nodes() -> Iterator[list[int]]:
    """Processes of two network namespaces, with cables between 10.55.N.1 and 10.55.N.2."""
    nodes = [subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=-1) for _ in range(2)]
    try:
        for node in nodes:
            assert node.stdout is not None
            node.stdout.readline()
        first, second = (node.pid for node in nodes)
        for number, cable in enumerate(CABLES):
            _run(f"ip link add {cable} netns {first} type veth peer name {cable} netns {second}")
            for host, pid in enumerate((first, second), 1):
                for line in (f"address add 10.55.{number}.{host}/24 dev {cable}", f"link set {cable} up"):
                    _run(f"nsenter --target={pid} --net -- ip {line}")
        for pid in (first, second):
            _run(f"nsenter --target={pid} --net -- ip link set lo up")
        yield [first, second]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def received() -> list[int]:
    """Bytes that have come through each cable of this node."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return [int(line.split(":")[1].split()[0]) for cable in CABLES for line in lines if cable in line]


def sync(nodes: list[int], case: Case) -> list[int]:
    """What this rank's node receives during one sync, by cable."""
    rank = int(os.environ[env.RANK])
    with open(f"/proc/{nodes[rank // case.per_node]}/ns/net") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    with job_of(case) as job:

        def together(moment: str) -> None:
            job.store.set(f"{moment} {rank}", "1")
            job.store.wait([f"{moment} {other}" for other in range(case.ranks)])

        trains = rank < case.trainers
        source = WeightSource(Actor(case, rank), case.sides, case.section, job) if trains else None
        target = WeightTarget(case.sides, case.section, job) if not trains else None
        together("connected")
        before = received()
        together("counted")
        if source is not None:
            source.publish(0)
            source.finish()
        else:
            assert target is not None
            target.write(Engine(case, rank), 0)
        together("synced")
        found = [after - first for after, first in zip(received(), before, strict=True)]
        together("counted again")
        if target is not None:
            target.close()
        return found


def test_each_byte_crosses_the_cable_once() -> None:
    """One of two, which take turns."""
    least = network_lower_bound(CASE.sides, CASE.per_node, CASE.dtype.itemsize)[1]
    with two_nodes() as nodes:
        address = {env.MASTER_ADDR: "10.55.0.1", env.GLOO_SOCKET_IFNAME: ",".join(CABLES)}
        ranks = run_ranks(sync, CASE.ranks, nodes, CASE, join=False, timeout=60, environ=address)
    trainers, engines = ranks[: CASE.trainers], ranks[CASE.trainers :]
    assert max(map(sum, trainers)) < HEADERS * least, "only confirmations"
    for count in engines:
        assert least <= sum(count) < (1 + HEADERS) * least
        assert min(count) > 0.15 * least

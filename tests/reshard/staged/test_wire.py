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
from rlhpc.reshard.staged.plan import network_lower_bound
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.reshard.staged.target import WeightTarget
from tests.helpers.distributed import run_ranks
from tests.reshard.staged.ends import Actor, Case, Engine, job_of
from tests.rewards.users import needs_root

pytestmark = [pytest.mark.ranks, needs_root]

# Two trainers on one node, two engines on the other, which both need the whole model.
CASE = Case("qwen2", 2, 2, per_node=2, vocab=20000, axes={"tp": 2}, verify="never")
HEADERS = 0.02  # share of a message's bytes
CABLE = "cable0"


@contextmanager
def two_nodes() -> Iterator[list[int]]:
    """Processes of two network namespaces, with a cable between 10.55.0.1 and 10.55.0.2."""
    nodes = [subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=-1) for _ in range(2)]
    try:
        for node in nodes:
            assert node.stdout is not None
            node.stdout.readline()
        first, second = (node.pid for node in nodes)
        _run(f"ip link add {CABLE} netns {first} type veth peer name {CABLE} netns {second}")
        for host, pid in enumerate((first, second), 1):
            for line in (f"address add 10.55.0.{host}/24 dev {CABLE}", f"link set {CABLE} up", "link set lo up"):
                _run(f"nsenter --target={pid} --net -- ip {line}")
        yield [first, second]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def received() -> int:
    """Bytes that have come through this node's cable."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if CABLE in line)
    return int(line.split(":")[1].split()[0])


def sync(nodes: list[int], case: Case) -> int:
    """What this rank's node receives during one sync."""
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
        found = received() - before
        together("counted again")
        if target is not None:
            target.close()
        return found


def test_each_byte_crosses_the_cable_once() -> None:
    least = network_lower_bound(CASE.sides, CASE.per_node, CASE.dtype.itemsize)[1]
    with two_nodes() as nodes:
        address = {env.MASTER_ADDR: "10.55.0.1", env.GLOO_SOCKET_IFNAME: CABLE}
        ranks = run_ranks(sync, CASE.ranks, nodes, CASE, join=False, timeout=60, environ=address)
    trainers, engines = ranks[: CASE.trainers], ranks[CASE.trainers :]
    assert max(trainers) < HEADERS * least, "only confirmations"
    for count in engines:
        assert least <= count < (1 + HEADERS) * least

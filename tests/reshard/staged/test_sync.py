"""Versions of weights on their way from trainers to engines: bits, bytes, order, memory, faults."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from rlhpc.core.errors import ReshardError
from rlhpc.reshard.staged.layout import StagingMemory
from rlhpc.reshard.staged.plan import plan_staged_sync
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.reshard.staged.target import WeightTarget
from tests.helpers.distributed import run_ranks
from tests.reshard.staged.bounds import network_bytes, network_lower_bound
from tests.reshard.staged.ends import BUCKET, Actor, Case, Engine, held_bytes, job_of, leave_for, staging_of

pytestmark = pytest.mark.ranks

VERSIONS = 3
CASES = [
    pytest.param(Case("qwen2_tied", 2, 1, axes={"tp": 2}), id="tied-2+1"),
    pytest.param(Case("qwen3moe", 2, 1, tp=2, axes={"tp": 2, "ep": 2}, dtype=torch.bfloat16), id="experts-2+2"),
    # Trainers on one node, two engines on the other, which need the same.
    pytest.param(Case("dsv3", 4, 2, per_node=4, axes={"pp": 2, "ep": 2}, dtype=torch.bfloat16), id="two-nodes-4+2"),
    pytest.param(Case("qwen2", 2, 3, per_node=2, verify=2), id="dense-2+3", marks=pytest.mark.long),
    pytest.param(
        Case("mixtral", 2, 2, tp=2, per_node=2, axes={"pp": 2}), id="engine-per-node-2+4", marks=pytest.mark.long
    ),
]


def sync(case: Case) -> dict[str, Any]:
    """Several versions; what this rank found."""
    with job_of(case) as job:
        if job.rank < case.trainers:
            actor = Actor(case, job.rank)
            source = WeightSource(actor, case.sides, case.section, job)
            for version in range(VERSIONS):
                actor.train(version)
                source.publish(version)
                actor.train(100)  # what is on its way does not change
            source.close()
            return {"bytes": source.counts.sent, "memory": held_bytes(source)}
        engine, target = Engine(case, job.rank), WeightTarget(case.sides, case.section, job)
        memory, wrong = held_bytes(target), []
        for version in range(VERSIONS):
            target.wait(version)
            assert target.ready(version)
            target.write(engine, version)
            wrong += engine.wrong(version)
        assert engine.opened == engine.closed == VERSIONS
        target.close()
        moved = {"bytes": target.received_bytes, "forwarded": target.forwarded_bytes}
        return {"wrong": wrong, "memory": memory, **moved}


@pytest.mark.parametrize("case", CASES)
def test_engines_have_the_bits_of_each_version_and_each_node_receives_them_once(case: Case) -> None:
    ranks = run_ranks(sync, case.ranks, case, join=False, timeout=120)
    options = {"ranks_per_node": case.per_node, "itemsize": case.dtype.itemsize, "bucket_bytes": BUCKET}
    plan = plan_staged_sync(case.sides, **options)
    trainers, engines = ranks[: case.trainers], ranks[case.trainers :]
    assert plan.num_buckets > 2
    assert [rank["wrong"] for rank in engines] == [[]] * len(engines)
    assert all(found["memory"] <= plan.staging[rank] for rank, found in enumerate(ranks))
    assert [rank["bytes"] for rank in trainers] == [VERSIONS * plan.traffic[i].sent for i in range(case.trainers)]
    for rank, found in enumerate(engines, case.trainers):
        assert found["bytes"] == VERSIONS * plan.traffic[rank].received
        assert found["forwarded"] == VERSIONS * plan.traffic[rank].forwarded
    if case.trainers % case.per_node == 0:  # all that engines receive crosses the network
        least = network_lower_bound(case.sides, case.per_node, case.dtype.itemsize)
        assert network_bytes(plan, case.per_node) == least
        assert sum(rank["bytes"] for rank in trainers) == VERSIONS * sum(least.values())


# ---- two ranks, what may happen between them

PAIR = Case("qwen2", 1, 1)


def lag(case: Case) -> list[Any]:
    """A trainer that does not wait for its engine, and an engine that skips versions."""
    with job_of(case) as job:
        if job.rank == 0:
            actor = Actor(case, 0)
            source = WeightSource(actor, case.sides, case.section, job)
            for version in (5, 6, 7):
                actor.train(version)
                source.publish(version)
            while job.store.add("written", 0) == 0:
                assert not source.sent  # two versions are staged, the third waits
                time.sleep(0.05)
            source.finish()
            actor.train(8)
            source.publish(8)
            source.close()
            return []
        engine, target = Engine(case, 1), WeightTarget(case.sides, case.section, job)
        while not target.ready(6):
            time.sleep(0.01)
        time.sleep(0.3)
        found = [target.ready(5), target.ready(7), len(target._arrived), len(staging_of(target))]
        target.write(engine, 5)
        found.append(engine.wrong(5))
        job.store.add("written", 1)
        target.write(engine, 8)
        found.append(engine.wrong(8))
        target.close()
        return [*found, target._arrived == {}]


def test_two_versions_are_staged_and_older_ones_can_be_skipped() -> None:
    found = run_ranks(lag, 2, PAIR, join=False, timeout=60)[1]
    assert found == [True, False, 2, 0, [], [], True]


def spoil(case: Case) -> list[str]:
    """An element that changes in the engine's staging memory, in the second version of four; every other is checked."""
    with job_of(case) as job:
        if job.rank < case.trainers:
            actor = Actor(case, job.rank)
            source = WeightSource(actor, case.sides, case.section, job)
            for version in range(4):
                actor.train(version)
                source.publish(version)
            source.close()
            return []
        engine, target = Engine(case, job.rank), WeightTarget(case.sides, case.section, job)
        found = []
        for version in range(4):
            target.wait(version)
            if job.rank == case.trainers:
                _change(target._arrived[version].staging, target, "model.layers.1.mlp.down_proj.weight")
            try:
                target.write(engine, version)
                found.append("")
            except ReshardError as error:
                found.append(str(error))
                target._drop([version])
        target.close()
        return found


def _change(staging: StagingMemory, target: WeightTarget, name: str) -> None:
    block = next(block for block in target._layout.blocks if block.shard.tensor.name == name)
    staging.get(block)[0, 0] += 1e-3


def test_a_changed_weight_is_named_in_the_versions_that_are_verified() -> None:
    found = run_ranks(spoil, 3, Case("qwen2", 1, 2, verify=2), join=False, timeout=60)
    message = "weights of version {} differ from the trainers' on rank 1: model.layers.1.mlp.down_proj.weight"
    assert found[1] == [message.format(0), "", message.format(2), ""]
    assert found[2] == [""] * 4


def other_plan(case: Case) -> str:
    """The engine's rank has another size of bucket than the trainer's."""
    with job_of(case) as job:
        try:
            job.plan(case.sides, bucket_mib=1 + job.rank)
        except ReshardError as error:
            return str(error)
    return ""


def test_another_plan_is_refused_before_anything_is_connected() -> None:
    found = run_ranks(other_plan, 2, PAIR, join=False, timeout=60)
    assert found == ["", "rank 1 computed another weight sync plan than rank 0"]


def lose(case: Case, killed: int) -> str:
    """The other rank is killed while a version is on its way; the error of the main thread here."""
    rank = int(os.environ["RANK"])
    if rank == killed:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return "killed"
    with job_of(case, host=1 - killed) as job:
        if job.rank == 0:
            actor = Actor(case, 0)
            source = WeightSource(actor, case.sides, case.section, job)
            actor.train(0)
            if killed == 0:
                source._send = lambda version: os.kill(os.getpid(), signal.SIGKILL)
            source.publish(0)
            leave_for(job.store, 1)
            return _error(source.finish)
        target = WeightTarget(case.sides, case.section, job)
        if killed == 1:
            target._receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        leave_for(job.store, 0)
        return _error(lambda: target.write(Engine(case, 1), 0))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_an_error_of_the_other_one(killed: int) -> None:
    found = run_ranks(lose, 2, PAIR, killed, join=False, timeout=60)
    thread = ("sending", "receiving")[1 - killed]
    assert found[killed] == "killed"
    assert found[1 - killed].startswith(f"PeerLost: {thread} weights: weights 0 1: lost rank {killed}: ")


def close_early(case: Case) -> tuple[float, bool]:
    """An engine that ends while it waits for the next version, or holds two that it has not written."""
    with job_of(case) as job:
        if job.rank == 0:
            actor = Actor(case, 0)
            source = WeightSource(actor, case.sides, case.section, job)
            source.publish(0)
            source.close()
            return 0.0, True
        target = WeightTarget(case.sides, case.section, job)
        target.wait(0)
        time.sleep(0.1)
        began = time.monotonic()
        target.close()
        return time.monotonic() - began, target._thread.join(0)


def test_an_engine_that_waits_for_a_version_can_close() -> None:
    seconds, ended = run_ranks(close_early, 2, PAIR, join=False, timeout=60)[1]
    assert ended
    assert seconds < 4


def _error(action: Any) -> str:
    try:
        action()
    except ReshardError as error:
        cause = type(error.__cause__).__name__
        return f"{cause}: {error}"
    return ""

"""Versions of weights on their way as deltas: the bits of a full sync, fewer bytes, and what is wrong is sent again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhpc.core.errors import ReshardError
from rlhpc.reshard.staged import source as senders
from rlhpc.reshard.staged import target as receivers
from rlhpc.reshard.staged.delta import HEADER_BYTES
from rlhpc.reshard.staged.plan import plan_staged_sync
from rlhpc.reshard.staged.source import SentCounts, WeightSource
from rlhpc.reshard.staged.target import WeightTarget
from tests.helpers.distributed import run_ranks
from tests.reshard.staged.ends import BUCKET, Actor, Case, Engine, held_bytes, job_of, staging_of

pytestmark = pytest.mark.ranks

VERSIONS = 4
PAIR = Case("qwen2", 1, 1, dtype=torch.bfloat16, rate=0.02, delta="compressed", verify="never")
CASES = [
    # Engines of two ranks, experts, and routers in float32.
    pytest.param(
        Case("qwen3moe", 2, 1, tp=2, axes={"tp": 2, "ep": 2}, dtype=torch.bfloat16, rate=0.02, delta="plain"),
        id="plain-experts-2+2",
    ),
    # Each of two engines on a node forwards to the other.
    pytest.param(
        Case("dsv3", 2, 2, per_node=2, axes={"pp": 2}, dtype=torch.bfloat16, rate=0.02, delta="compressed", verify=2),
        id="compressed-two-nodes-2+2",
    ),
]


def sync(case: Case, faults: Sequence[str] = ()) -> dict[str, Any]:
    """Several versions; what this rank found. The faults are planted one after each version from the second on."""
    versions = max(VERSIONS, len(faults) + 2)
    with job_of(case) as job:
        if job.rank < case.trainers:
            actor = Actor(case, job.rank)
            source = WeightSource(actor, case.sides, case.section, job)
            counts, before = [], SentCounts()
            for version in range(versions):
                actor.train(version)
                source.publish(version)
                actor.train(0)  # what is on its way does not change
                source.finish()
                counts.append(source.counts.since(before))
                before = replace(source.counts)
                while job.store.add(f"written {version}", 0) < case.ranks - case.trainers:
                    time.sleep(0.01)
            source.close()
            return {"counts": counts, "memory": held_bytes(source)}
        engine, target = Engine(case, job.rank), WeightTarget(case.sides, case.section, job)
        wrong = []
        for version in range(versions):
            target.write(engine, version)
            wrong += engine.wrong(version)
            if 0 < version <= len(faults):
                FAULTS[faults[version - 1]](target)
            job.store.add(f"written {version}", 1)
        target.close()
        return {"wrong": wrong, "memory": held_bytes(target)}


def plan_of(case: Case) -> Any:
    options = {"ranks_per_node": case.per_node, "itemsize": case.dtype.itemsize, "bucket_bytes": case.bucket}
    return plan_staged_sync(case.sides, **options, delta=case.delta)


@pytest.mark.parametrize("case", CASES)
def test_engines_have_the_bits_of_a_full_sync_for_a_small_part_of_its_bytes(case: Case) -> None:
    ranks = run_ranks(sync, case.ranks, case, join=False, timeout=120)
    plan = plan_of(case)
    trainers, engines = ranks[: case.trainers], ranks[case.trainers :]
    assert plan.num_buckets > 2
    assert [rank["wrong"] for rank in engines] == [[]] * len(engines)
    assert all(found["memory"] <= plan.staging[rank] for rank, found in enumerate(ranks))
    for rank, found in enumerate(trainers):
        first, *others = found["counts"]
        sent = plan.traffic[rank].sent
        assert [each.weights for each in found["counts"]] == [sent] * VERSIONS
        assert sent < first.full <= sent + 2 * plan.num_buckets * case.ranks * HEADER_BYTES
        assert (first.delta, first.changed, first.repaired) == (0, 0, 0)
        for each in others:
            assert 0.015 < each.changed * 2 / sent < 0.025
            assert (each.full, each.repaired) == (0, 0)
            assert each.sent < 0.25 * sent, "headers of small buckets included"


def test_a_changed_element_takes_few_bytes() -> None:
    for delta, most in (("plain", 3.3), ("compressed", 1.8)):
        case = replace(PAIR, delta=delta, rate=0.007, vocab=8000, bucket=1 << 20)
        for each in run_ranks(sync, 2, case, join=False, timeout=60)[0]["counts"][1:]:
            assert each.full == each.repaired == 0
            assert each.delta <= most * each.changed, "headers included"


def test_versions_that_change_everywhere_are_sent_in_full() -> None:
    case = replace(PAIR, delta="plain", rate=1.0)
    found = run_ranks(sync, 2, case, join=False, timeout=60)
    assert found[1]["wrong"] == []
    for each in found[0]["counts"]:
        assert (each.delta, each.changed) == (0, 0)
        assert each.full == each.weights + HEADER_BYTES * plan_of(case).num_buckets


# ---- what is planted between two versions


def _base_with_another_bit(target: WeightTarget) -> None:
    receiver, message = _receives(target)
    receiver.base.place(message)[5] ^= 1


def _base_is_an_older_version(target: WeightTarget) -> None:
    receiver, _ = _receives(target)
    receiver._base = replace(receiver._base, staging=_other(target))


def _bucket_of_the_last_version_is_lost(target: WeightTarget) -> None:
    """It is not known to be: the version counts as complete, and the bucket as it was."""
    receiver, message = _receives(target)
    place = receiver.base.place(message)
    place.copy_(_other(target).place(message))
    receiver._base.sums[1, message.peer] = receivers.checksum(place.numpy())


def _bucket_is_lost_on_the_way(target: WeightTarget) -> None:
    _change_once(lambda delta, place: None)


def _bucket_changes_on_the_way(target: WeightTarget) -> None:
    def changed(delta: Any, place: Any, apply: Any = receivers.apply) -> None:
        payload = delta.payload.copy()
        payload[-1] ^= 1
        apply(replace(delta, payload=payload), place)

    _change_once(changed)


def _change_once(first: Callable[[Any, Any], None]) -> None:
    """The next delta is applied in another way."""
    apply = receivers.apply

    def once(delta: Any, place: Any) -> None:
        receivers.apply = apply
        first(delta, place)

    receivers.apply = once


def _no_version_is_known(target: WeightTarget) -> None:
    _receives(target)[0]._base = None


def _other(target: WeightTarget) -> Any:
    """Staging memory with the version before the last one."""
    return next(each for each in staging_of(target) if each is not _receives(target)[0].base)


def _receives(target: WeightTarget) -> tuple[Any, Any]:
    """What receives deltas, and the first message of its second bucket."""
    return target._receiver, target._layout.receives[1][0]


FAULTS: dict[str, Callable[[WeightTarget], None]] = {
    "base with another bit": _base_with_another_bit,
    "older base": _base_is_an_older_version,
    "lost bucket": _bucket_of_the_last_version_is_lost,
    "lost on the way": _bucket_is_lost_on_the_way,
    "changed on the way": _bucket_changes_on_the_way,
    "no version": _no_version_is_known,
}


def test_a_wrong_base_or_a_lost_bucket_is_found_and_sent_in_full() -> None:
    buckets = plan_of(PAIR).num_buckets
    trainer, engine = run_ranks(sync, 2, PAIR, tuple(FAULTS), join=False, timeout=60)
    assert engine["wrong"] == []
    first, second, *counts = trainer["counts"]
    assert first.repaired == second.repaired == second.full == 0
    for fault, found in zip(FAULTS, counts, strict=True):
        if fault in ("older base", "no version"):  # as an engine that joins again
            assert found.repaired == (buckets if fault == "older base" else 0)
            assert found.full >= found.weights
        else:
            assert found.repaired == 1, fault
            assert 0 < found.full <= BUCKET, fault


def send_wrong(case: Case) -> str:
    """A trainer whose checksums are wrong; the error of the engine."""
    with job_of(case) as job:
        if job.rank == 0:
            actor = Actor(case, 0)
            senders.checksum = lambda data: 0
            source = WeightSource(actor, case.sides, case.section, job)
            actor.train(0)
            source.publish(0)
            return ""
        target = WeightTarget(case.sides, case.section, job)
        with pytest.raises(ReshardError) as found:
            target.wait(0)
        return str(found.value)


def test_a_message_that_is_wrong_in_full_too_is_an_error() -> None:
    found = run_ranks(send_wrong, 2, PAIR, join=False, timeout=60)
    assert found[1] == "receiving weights: rank 0 sent a bucket of weights twice with a wrong checksum"


def other_delta(case: Case) -> str:
    """The engine's rank receives in another form than the trainer's sends."""
    with job_of(case) as job:
        try:
            job.plan(case.sides, 1, ("plain", "compressed")[job.rank])
        except ReshardError as error:
            return str(error)
    return ""


def test_another_form_is_refused_before_anything_is_connected() -> None:
    found = run_ranks(other_delta, 2, PAIR, join=False, timeout=60)
    assert found == ["", "rank 1 computed another weight sync plan than rank 0"]

"""Plans between disjoint ranks, carried out on numbered elements: what arrives where, how often over the network."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from random import Random

import pytest

from rlhpc.models import ModelShape
from rlhpc.reshard.plan import Copy
from rlhpc.reshard.sides import SyncSides, sync_sides
from rlhpc.reshard.staged.plan import StagedPlan, plan_staged_sync
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from tests.helpers.movement import SHAPES, Numbered, random_layout
from tests.reshard.staged.bounds import network_bytes, network_lower_bound

ROUNDS = 8


def random_sides(shape: ModelShape, rng: Random) -> SyncSides:
    """Trainers on the first ranks and one to eight engines on those after them."""
    training = random_layout(shape, rng)
    by_experts = shape.experts is not None and rng.random() < 0.5
    sizes = [tp for tp in (1, 2, 4, 8) if not by_experts or shape.experts.num_experts % tp == 0]
    tp, trainers = rng.choice(sizes), training.world_size
    rollouts = range(trainers, trainers + tp * rng.choice((1, 2, 3, 8)))
    return sync_sides(shape, training, EngineLayout(tp, by_experts), range(trainers), rollouts)


def check(sides: SyncSides, per_node: int, itemsize: int, rng: Random) -> None:
    """Every property of a plan."""
    options = {"ranks_per_node": per_node, "itemsize": itemsize, "bucket_bytes": rng.choice((256, 4096, 1 << 20))}
    plan = plan_staged_sync(sides, **options)
    numbered = Numbered(sides.source, sides.target)
    numbered.carry_out_staged(plan.syncs, plan.forwards)
    numbered.assert_filled()
    _check_bytes(plan, sides, per_node, itemsize)
    assert network_bytes(plan, per_node) == _counted_bound(numbered, sides, per_node, itemsize)
    rank = rng.choice(sides.ranks)
    kept = plan_staged_sync(sides, rank=rank, **options)
    assert replace(kept, syncs=plan.syncs, forwards=plan.forwards) == plan
    for end in ({"source": rank}, {"target": rank}):
        assert plan.between(plan.syncs, **end) == kept.between(kept.syncs, **end)
        assert plan.between(plan.forwards, **end) == kept.between(kept.forwards, **end)


def _check_bytes(plan: StagedPlan, sides: SyncSides, per_node: int, itemsize: int) -> None:
    totals: dict[str, Counter[int]] = {
        name: Counter() for name in ("sent", "received", "forwarded", "taken", "in", "out")
    }
    in_bucket: Counter[tuple[int, int]] = Counter()
    for copies, out, into in ((plan.syncs, "sent", "received"), (plan.forwards, "forwarded", "taken")):
        for copy in copies:
            size = copy.box.volume * (4 if copy.tensor.float32 else itemsize)
            totals[out][copy.source_rank] += size
            totals[into][copy.target_rank] += size
            same_node = copy.source_rank // per_node == copy.target_rank // per_node
            assert out == "sent" or same_node
            totals["out"][copy.source_rank] += 0 if same_node else size
            totals["in"][copy.target_rank] += 0 if same_node else size
            if out == "sent":
                in_bucket[copy.source_rank, copy.bucket] += size
                in_bucket[copy.target_rank, copy.bucket] += size
    assert max(in_bucket.values()) == plan.largest_bucket <= plan.bucket_bytes
    for rank, traffic in plan.traffic.items():
        counted = [totals[name][rank] for name in ("sent", "out", "received", "in", "forwarded", "taken")]
        assert counted == [*astuple(traffic)], rank


def _counted_bound(numbered: Numbered, sides: SyncSides, per_node: int, itemsize: int) -> dict[int, int]:
    """The least that each node must receive, counted by element; asserts that the plan's figure is equal."""
    found = {}
    for node in {rank // per_node for rank in sides.target}:
        held = numbered.held(rank for rank in sides.source if rank // per_node == node)
        lacking = {}
        for rank, shards in sides.target.items():
            for shard in shards if rank // per_node == node else ():
                wanted = numbered.wanted(Copy(rank, rank, shard, shard)).ravel()
                lacking |= dict.fromkeys(wanted[~held[wanted]].tolist(), 4 if shard.tensor.float32 else itemsize)
        found[node] = sum(lacking.values())
    assert found == network_lower_bound(sides, per_node, itemsize)
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("kind", SHAPES)
def test_each_node_receives_once_what_its_engines_need_and_forwards_the_rest(kind: str) -> None:
    for seed in range(ROUNDS):
        rng = Random(f"{kind} {seed}")
        check(random_sides(SHAPES[kind], rng), rng.choice((1, 2, 4, 8)), rng.choice((2, 4)), rng)


def engines_of(count: int, tp: int, kind: str = "qwen2") -> SyncSides:
    """Two trainers and ``count`` engines after them."""
    return sync_sides(SHAPES[kind], ParallelLayout(2, tp=2), EngineLayout(tp), range(2), range(2, 2 + count * tp))


def test_the_ranks_of_a_node_receive_alike() -> None:
    plan = plan_staged_sync(engines_of(6, 1), ranks_per_node=8, itemsize=2, bucket_bytes=1 << 20)
    received = [plan.traffic[rank].received for rank in range(2, 8)]
    assert max(received) - min(received) <= 2 * 37 * 8  # the embedding cannot be divided
    assert min(plan.traffic[rank].sent for rank in (0, 1)) * 2 >= 0.95 * sum(received)


def test_nodes_with_engines_alike_share_their_plan() -> None:
    """Otherwise plans of large jobs would need time and memory for each rank's list."""
    sides = sync_sides(SHAPES["qwen2"], ParallelLayout(4), EngineLayout(2), range(4), range(4, 16))
    plan = plan_staged_sync(sides, ranks_per_node=4, itemsize=2, bucket_bytes=1 << 20)
    by_place = [{plan.traffic[rank].forwarded for rank in range(place, 16, 4)} for place in range(4, 8)]
    assert all(len(found) == 1 for found in by_place)


def test_another_plan_has_another_digest() -> None:
    options = {"ranks_per_node": 4, "itemsize": 2, "bucket_bytes": 1 << 20}
    plans = [
        plan_staged_sync(engines_of(2, 1), **options),
        plan_staged_sync(engines_of(1, 2), **options),
        plan_staged_sync(engines_of(2, 1), **{**options, "ranks_per_node": 2}),
        plan_staged_sync(engines_of(2, 1), **{**options, "bucket_bytes": 1 << 10}),
        plan_staged_sync(engines_of(2, 1), **options, delta="plain"),
        plan_staged_sync(engines_of(2, 1), **options, delta="compressed"),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_checksums_reach_engines_from_different_trainers() -> None:
    plan = plan_staged_sync(engines_of(3, 1), ranks_per_node=8, itemsize=2, bucket_bytes=1 << 20)
    assert plan.heralds == {2: 0, 3: 1, 4: 0}


def test_staging_memory_holds_what_is_sent_once_and_two_versions_of_what_is_needed() -> None:
    bucket = 64
    sides = engines_of(6, 1)
    plan = plan_staged_sync(sides, ranks_per_node=2, itemsize=2, bucket_bytes=bucket)
    sizes = {rank: sum(s.box.volume for s in shards) * 2 for rank, shards in (sides.source | sides.target).items()}
    assert sum(plan.traffic[rank].sent for rank in (0, 1)) == 3 * sizes[2]  # three nodes of two engines
    assert [plan.staging[rank] for rank in (0, 1)] == [sizes[rank] + bucket for rank in (0, 1)]
    assert [plan.staging[rank] for rank in range(2, 8)] == [2 * sizes[2] + bucket] * 6
    deltas = plan_staged_sync(sides, ranks_per_node=2, itemsize=2, bucket_bytes=bucket, delta="plain")
    assert [deltas.staging[rank] for rank in (0, 1)] == [2 * sizes[rank] + 4 * bucket for rank in (0, 1)]
    assert [deltas.staging[rank] for rank in range(2, 8)] == [2 * sizes[2] + 2 * bucket] * 6
    assert (deltas.syncs, deltas.forwards, deltas.traffic) == (plan.syncs, plan.forwards, plan.traffic)

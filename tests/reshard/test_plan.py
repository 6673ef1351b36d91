"""Plans of movement, carried out on numbered elements over random layouts: what arrives, how much, from whom."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest

from rlhpc.models import ModelShape, shape_of
from rlhpc.reshard.checksum_plan import plan_checksums, slots_of
from rlhpc.reshard.plan import ReshardPlan, Side, joined, lower_bound, plan_reshard
from rlhpc.reshard.sides import Alias, aliases, sync_sides
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Box, Shard, TensorSpec
from tests.helpers.cases import long_but
from tests.helpers.movement import SHAPES, Numbered, random_cuts, random_layout
from tests.helpers.published import DEEPSEEK_V3_BF16


def random_sides(shape: ModelShape, rng: Random) -> tuple[Side, Side]:
    """A training layout and engines on its ranks, or on further ones."""
    training = random_layout(shape, rng)
    by_experts = shape.experts is not None and rng.random() < 0.5
    sizes = [tp for tp in (1, 2, 4, 8) if not by_experts or shape.experts.num_experts % tp == 0]
    if rng.random() < 0.5:
        tp = rng.choice([tp for tp in sizes if training.world_size % tp == 0])
        sides = sync_sides(shape, training, EngineLayout(tp, by_experts))
    else:
        tp, trainers = rng.choice(sizes), training.world_size
        rollouts = range(trainers, trainers + tp * rng.choice((1, 2)))
        sides = sync_sides(shape, training, EngineLayout(tp, by_experts), rollout_ranks=rollouts)
    return sides.source, sides.target


def check(source: Side, target: Side, rng: Random, buckets: tuple[int, ...]) -> ReshardPlan:
    """Every property of a plan for the sides, with nodes of any size; returns it."""
    itemsize, per_node = rng.choice((2, 4)), rng.choice((1, 2, 4, 8))
    options = {"ranks_per_node": per_node, "itemsize": itemsize, "bucket_bytes": rng.choice(buckets)}
    plan = plan_reshard(source, target, **options)
    numbered = Numbered(source, target)
    numbered.carry_out(plan)
    numbered.assert_filled()
    _check_bytes(plan, numbered, itemsize)
    _check_senders(plan, numbered, per_node)
    rank = rng.choice(sorted({*source, *target}))
    kept = plan_reshard(source, target, keep=[rank], **options)
    assert replace(kept, copies=plan.copies) == plan
    assert list(kept.copies) == [copy for copy in plan.copies if rank in (copy.source_rank, copy.target_rank)]
    return plan


def _check_bytes(plan: ReshardPlan, numbered: Numbered, itemsize: int) -> None:
    least = {rank: numbered.lacking(rank, itemsize) for rank in plan.traffic}
    assert {rank: traffic.received for rank, traffic in plan.traffic.items()} == least
    bound = lower_bound(numbered.source, numbered.target, itemsize)
    assert bound == {rank: least[rank] for rank in bound}
    sent, received, local = defaultdict(int), defaultdict(int), defaultdict(int)
    for copy in plan.copies:
        size = copy.box.volume * (4 if copy.tensor.float32 else itemsize)
        if copy.bucket < 0:
            local[copy.target_rank] += size
        else:
            sent[copy.source_rank, copy.bucket] += size
            received[copy.target_rank, copy.bucket] += size
    assert max([0, *sent.values(), *received.values()]) == plan.largest_bucket <= plan.bucket_bytes
    for rank, traffic in plan.traffic.items():
        assert traffic.local == local[rank]
        assert traffic.sent == sum(size for (sender, _), size in sent.items() if sender == rank)
    assert len(plan.copies) == plan.num_copies


def _check_senders(plan: ReshardPlan, numbered: Numbered, per_node: int) -> None:
    """Nothing comes from elsewhere that the rank has itself, nor from another node what its own node has."""
    held = {rank: numbered.held([rank]) for rank in plan.traffic}
    of_node = {
        node: numbered.held(rank for rank in plan.traffic if rank // per_node == node)
        for node in {rank // per_node for rank in plan.traffic}
    }
    across = set()
    for copy in plan.copies:
        wanted, node = numbered.wanted(copy), copy.target_rank // per_node
        assert held[copy.source_rank][wanted].all()
        assert (copy.bucket == -1) == (copy.source_rank == copy.target_rank)
        if copy.source_rank != copy.target_rank:
            assert not held[copy.target_rank][wanted].any()
        if copy.source_rank // per_node != node:
            across.add(copy.target_rank)
            assert not of_node[node][wanted].any()
    assert {rank for rank, traffic in plan.traffic.items() if traffic.received_across} == across


@pytest.mark.heavy
@pytest.mark.parametrize("rounds", long_but((6,), (6, 30)))
@pytest.mark.parametrize("kind", SHAPES)
def test_engines_receive_every_element_once_and_no_more_than_they_lack(kind: str, rounds: int) -> None:
    for seed in range(rounds):
        rng = Random(f"{kind} {seed}")
        check(*random_sides(SHAPES[kind], rng), rng, (256, 4096, 1 << 20))


@pytest.mark.heavy
@pytest.mark.parametrize("rounds", long_but((90,), (90, 450)))
@pytest.mark.parametrize("part", range(4))
def test_any_cut_into_any_other_is_planned_even_where_boxes_overlap(part: int, rounds: int) -> None:
    finer = 0
    for seed in range(rounds):
        rng = Random(f"{part} {seed}")
        source, target = random_cuts(rng)
        plan = check(source, target, rng, (4, 50, 1 << 20))
        finer += plan.num_copies > sum(len(shards) for shards in target.values())
    assert finer > rounds / 2


def test_ranks_that_hold_alike_send_alike() -> None:
    """Of 4 data-parallel copies none is asked for twice what another is, nor all for the same at the same time."""
    training = ParallelLayout(8, tp=2)
    sides = sync_sides(SHAPES["llama"], training, EngineLayout(4), rollout_ranks=range(8, 16))
    plan = plan_reshard(sides.source, sides.target, ranks_per_node=8, bucket_bytes=512, itemsize=2)
    sent = [plan.traffic[rank].sent for rank in range(8)]
    assert max(sent) < 1.1 * min(sent)
    assert plan.num_buckets < 1.5 * max(sent) / plan.bucket_bytes


def _rows(start: int, stop: int, local: int, name: str = "w", chunk: int = 0) -> Shard:
    """Rows of a tensor of 8 x 2 at a row of a parameter."""
    return Shard(TensorSpec("gate", (8, 2)), Box((start, 0), (stop, 2)), name, (local, 0), chunk)


def _plan(source: Side, target: Side, **changes: int) -> ReshardPlan:
    return plan_reshard(source, target, **{"ranks_per_node": 1, "bucket_bytes": 1 << 20, "itemsize": 2, **changes})


def _moved(plan: ReshardPlan) -> list[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    return [(copy.box, copy.source.local_start, copy.target.local_start) for copy in plan.copies]


def test_neighbours_that_go_on_in_both_parameters_are_one_copy() -> None:
    whole, finer = [_rows(0, 8, 4)], [_rows(0, 3, 4), _rows(3, 8, 7)]
    for source, target in ((whole, finer), (finer, whole), (finer, finer)):
        assert _moved(_plan({0: source}, {1: target})) == [(Box((0, 0), (8, 2)), (4, 0), (4, 0))]


@pytest.mark.parametrize(
    "second", [_rows(3, 8, 8), _rows(3, 8, 7, "v"), _rows(3, 8, 7, chunk=1)], ids=["gap", "name", "chunk"]
)
def test_neighbours_that_go_on_in_one_parameter_only_are_two_copies(second: Shard) -> None:
    whole, finer = [_rows(0, 8, 4)], [_rows(0, 3, 4), second]
    for source, target in ((whole, finer), (finer, whole)):
        assert len(_moved(_plan({0: source}, {1: target}))) == 2


def test_blocks_that_other_ranks_cut_are_one_copy_again_and_fit_their_bucket() -> None:
    """Rank 1's overlapping box cuts what rank 0 has in two; rank 0's own copy and that to its node stay whole."""
    source, target = {0: [_rows(0, 6, 0)], 2: [_rows(3, 8, 0)]}, {0: [_rows(0, 6, 0)], 1: [_rows(0, 6, 0)]}
    assert [copy.box.shape for copy in _plan(source, target, ranks_per_node=2).copies] == [(6, 2), (6, 2)]
    split = _plan(source, target, ranks_per_node=2, bucket_bytes=16)
    assert [(copy.bucket, copy.box.shape[0]) for copy in split.copies] == [(-1, 6), (0, 4), (1, 2)]


def test_the_digest_tells_of_every_change() -> None:
    source, target = {0: [_rows(0, 4, 0)], 1: [_rows(4, 8, 0)]}, {2: [_rows(0, 8, 0)], 3: [_rows(0, 8, 1)]}
    tensor = TensorSpec("up", (8, 2))
    others = [
        _plan(source, target, bucket_bytes=1 << 19),
        _plan(source, target, ranks_per_node=4),
        _plan(source, target, itemsize=4),
        _plan({1: source[0], 0: source[1]}, target),
        _plan(source, {2: target[2]}),
        _plan(source, {**target, 3: [_rows(0, 8, 2)]}),
        _plan(source, {**target, 3: [_rows(0, 8, 1, "v")]}),
        _plan(source, {**target, 3: [_rows(0, 8, 1, chunk=1)]}),
        _plan({**source, 1: [_rows(4, 8, 1)]}, target),
        _plan({**source, 1: [_rows(3, 8, 0)]}, target),
        _plan(
            *({r: [replace(s, tensor=tensor) for s in held] for r, held in side.items()} for side in (source, target))
        ),
    ]
    digests = [plan.digest for plan in (_plan(source, target), *others)]
    assert len(set(digests)) == len(digests)
    assert _plan(dict(reversed(source.items())), target).digest == digests[0]


@pytest.mark.parametrize(
    "held", [[_rows(0, 3, 0), _rows(4, 8, 4)], [replace(_rows(0, 8, 0), tensor=TensorSpec("gate", (8, 3)))], []]
)
def test_a_source_that_lacks_part_of_a_tensor_is_a_fault(held: list[Shard]) -> None:
    with pytest.raises(AssertionError, match="gate"):
        _plan({0: held}, {1: [_rows(2, 8, 0)]})


def test_an_element_that_is_larger_than_a_bucket_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="bucket of 1"):
        _plan({0: [_rows(0, 8, 0)]}, {1: [_rows(0, 8, 0)]}, bucket_bytes=1)


@pytest.mark.heavy
def test_a_model_of_671_billion_weights_on_96_ranks_is_planned_in_seconds() -> None:
    training = ParallelLayout(96, tp=8, pp=12, ep=8, first_stage_layers=6, last_stage_layers=5)
    started = time.process_time()
    sides = sync_sides(shape_of(DEEPSEEK_V3_BF16), training, EngineLayout(32))
    plan = plan_reshard(sides.source, sides.target, ranks_per_node=8, bucket_bytes=128 << 20, itemsize=2, keep=[0])
    assert time.process_time() - started < 10
    least = lower_bound(sides.source, sides.target, 2)
    assert {rank: traffic.received for rank, traffic in plan.traffic.items()} == least
    busiest = max(traffic.sent for traffic in plan.traffic.values())
    assert busiest < 1.1 * max(least.values())
    assert plan.num_buckets * plan.bucket_bytes < 1.2 * busiest


def test_checksums_take_each_element_of_a_target_box_once() -> None:
    """A slot's parts make up its box; a stack of experts has a slot for each, and ranks alike share the work."""
    for seed in range(6):
        source, target = random_sides(SHAPES["mixtral" if seed % 2 else "qwen2"], Random(f"sums {seed}"))
        plans = {rank: plan_checksums(source, target, rank) for rank in {*source, *target}}
        left: dict[int, int] = {}
        boxes: dict[int, tuple[TensorSpec, Box]] = {}
        for rank, plan in plans.items():
            assert [added.shard for added in plan.actual] == list(target.get(rank, ()))
            for slot, shard in ((added.slot, added.shard) for added in plan.actual):
                count = slots_of(shard.tensor, shard.box)
                assert boxes.setdefault(slot, (shard.tensor, shard.box)) == (shard.tensor, shard.box)
                left |= {slot + i: shard.box.volume // count for i in range(count)}
        assert {plan.num_slots for plan in plans.values()} == {len(left)}
        for rank, plan in plans.items():
            for slot, part in ((added.slot, added.shard) for added in plan.expected):
                assert any(held.tensor == part.tensor and held.box.meet(part.box) == part.box for held in source[rank])
                count = slots_of(part.tensor, part.box)
                for i in range(count):
                    left[slot + i] -= part.box.volume // count
        assert not any(left.values())


def test_holders_of_the_same_box_share_its_sums() -> None:
    target = {2: [_rows(row, row + 1, 0) for row in range(8)]}
    source = {0: [_rows(0, 8, 0)], 1: [_rows(0, 8, 0)]}
    assert [len(plan_checksums(source, target, rank).expected) for rank in range(3)] == [4, 4, 0]


@pytest.mark.parametrize(
    ("held", "shape", "found"),
    [
        ([_rows(0, 3, 4), _rows(3, 8, 7)], (8, 2), Alias("w", _rows(0, 8, 4))),
        ([_rows(0, 3, 4), _rows(3, 8, 8)], (8, 2), None),
        ([_rows(0, 3, 4), _rows(3, 8, 7, chunk=1)], (8, 2), None),
        ([_rows(0, 3, 4)], (8, 2), None),
        ([_rows(0, 8, 4)], (8, 2, 1), None),
    ],
    ids=["whole", "two places", "two chunks", "a part", "other dimensions"],
)
def test_a_parameter_is_another_s_block_where_one_place_fills_it(
    held: list[Shard], shape: tuple[int, ...], found: Alias | None
) -> None:
    wanted = [replace(shard, local_start=(*shard.box.start, 0)[: len(shape)], chunk=0) for shard in held]
    copies = _plan({0: held}, {0: wanted}).local(0)
    assert len(copies) == (1 if found else len(held))
    assert aliases(copies, {"w": shape}) == ([found] if found else [])


def test_boxes_are_one_only_where_their_sides_are_the_same() -> None:
    """Two of the same volume, and one begins where the other ends."""
    first = Box((0, 0, 0), (1, 2, 3))
    assert joined(first, Box((1, 0, 0), (3, 2, 3))) == Box((0, 0, 0), (3, 2, 3))
    assert joined(first, Box((1, 0, 0), (2, 3, 2))) is None
    assert joined(first, Box((2, 0, 0), (3, 2, 3))) is None
    assert joined(first, first) is None

"""The two sides of a weight sync: shards of the training layout and of the engines, by rank of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rlhpc.models import ModelShape
from rlhpc.reshard.plan import Copy, ReshardPlan, Side, plan_reshard
from rlhpc.sharding.engine_shards import EngineLayout, engine_shards
from rlhpc.sharding.shards import Box, Shard
from rlhpc.sharding.trainer_shards import TrainerCut, trainer_side


@dataclass(frozen=True)
class SyncSides:
    """Shards of each rank of the job. A rank that both trains and generates is on both sides."""

    source: Side
    target: Side

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.source, *self.target})


def sync_sides(
    shape: ModelShape,
    training: TrainerCut,
    engine: EngineLayout,
    training_ranks: Sequence[int] | None = None,
    rollout_ranks: Sequence[int] | None = None,
) -> SyncSides:
    """Sides with training on ``training_ranks`` and engines on consecutive blocks of ``rollout_ranks``; both default to
    all ranks of ``training``.

    If a side has fewer ranks than its layout, they are the layout's first ranks and must hold the whole model together.
    """
    trainers = range(training.world_size) if training_ranks is None else training_ranks
    rollouts = range(training.world_size) if rollout_ranks is None else rollout_ranks
    cuts = [engine_shards(shape, engine, tp_rank) for tp_rank in range(engine.tp)]
    return SyncSides(
        trainer_side(shape, training, trainers),
        {rank: cuts[place % engine.tp] for place, rank in enumerate(rollouts)},
    )


def plan_weight_sync(
    sides: SyncSides, *, ranks_per_node: int, bucket_bytes: int, itemsize: int, rank: int | None = None
) -> ReshardPlan:
    """Plan of a weight sync; with ``rank``, its copies only. ``bucket_bytes`` limits a rank's buffers per direction.

    The executor packs one buffer while the other is in flight, so a bucket of the plan is half of it.
    """
    return plan_reshard(
        sides.source,
        sides.target,
        ranks_per_node=ranks_per_node,
        bucket_bytes=bucket_bytes // 2,
        itemsize=itemsize,
        keep=None if rank is None else [rank],
    )


@dataclass(frozen=True)
class Alias:
    """The engine's parameter ``name`` equals, element by element, ``source``: a block of a trainer's parameter."""

    name: str
    source: Shard


def aliases(copies: Sequence[Copy], parameters: Mapping[str, tuple[int, ...]]) -> list[Alias]:
    """Engine parameters filled completely from one place by copies inside one rank. ``parameters``: their shapes."""
    by_name: dict[str, list[Copy]] = {}
    for copy in copies:
        by_name.setdefault(copy.target.local_name, []).append(copy)
    found = []
    for name, filling in by_name.items():
        shape, places = parameters[name], {_distance(copy) for copy in filling}
        if len(places) == 1 and sum(copy.box.volume for copy in filling) == prod(shape):
            chunk, local_name, distance = places.pop()
            if len(distance) == len(shape):
                box = Box((0,) * len(shape), shape)
                found.append(Alias(name, Shard(filling[0].tensor, box, local_name, distance, chunk)))
    return found


def _distance(copy: Copy) -> tuple[int, str, tuple[int, ...]]:
    """Source parameter and offset per dimension; an empty offset if the numbers of dimensions differ."""
    source, target = copy.source.local_start, copy.target.local_start
    far = tuple(a - b for a, b in zip(source, target, strict=True)) if len(source) == len(target) else ()
    return copy.source.chunk, copy.source.local_name, far

"""What the loss of an engine costs: with recovery.lost_engines rejoin, and as a restart of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.config.schema import RunConfig
from rlhpc.plan.estimates.checkpoint_interval import CheckpointInterval
from rlhpc.sharding.placement import placement_of

FIRST_SECONDS = 5.0  # before an engine is started again for the first time; twice as long each further time


@dataclass(frozen=True)
class EngineLoss:
    """Seconds. ``engines``: their number; ``silent``: the trainers' longest wait for one that does not respond, for one
    that is slow ``slow``; ``away``: from the loss of one that is killed to its return; ``restart``: what a start of all
    ranks repeats and takes, on average; ``between``: mean time between failures of the engines' nodes."""

    engines: int
    silent: float
    slow: float
    away: float
    restart: float
    between: float

    @property
    def share(self) -> float:
        """The share of all generation that is lost to failures of nodes, if their engines come back after ``away``."""
        return self.away / self.engines / self.between


def engine_loss(config: RunConfig, start: float, interval: CheckpointInterval) -> EngineLoss | None:
    """The cost, where engines may be lost; None elsewhere. ``start``: predicted seconds of a start."""
    if not config.may_lose_engines:
        return None
    placement, policy = placement_of(config, config.world_size), config.recovery
    nodes = max(1.0, placement.engines.size / config.resources.ranks_per_node)
    every = interval.configured if interval.configured is not None else interval.best
    return EngineLoss(
        placement.num_engines,
        policy.engine_timeout_seconds,
        policy.slow_engine_seconds,
        FIRST_SECONDS + start,
        start + every / 2,
        3600 * config.planning.node_mtbf_hours / nodes,
    )

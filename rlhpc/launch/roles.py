"""Roles of a run's ranks, and the parts of them that start and end together."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder
from rlhpc.plan.checks.placement import check_roles
from rlhpc.sharding.placement import Placement


def roles_of(config: RunConfig, world_size: int) -> Placement | None:
    """Roles of a job's ranks; None if all do the same."""
    with suppress(UserError):  # such as a replay on a single rank
        placement = check_roles(config, world_size)
        return placement if placement.separate else None
    return None


def parts_of(config: RunConfig, world_size: int) -> list[range]:
    """Ranks that are started and ended together: all, or with recovery.lost_engines rejoin those before the engines,
    then each engine's; without those of rollout jobs."""
    roles = roles_of(config, world_size)
    if roles is None or not config.may_lose_engines:
        return [range(world_size)]
    return [range(roles.engines.first), *engine_parts(roles, range(roles.num_beginning))]


def outlives_nodes(config: RunConfig) -> bool:
    """True if the job goes on when it loses a node: with engines of its own that may be lost."""
    return config.may_lose_engines and len(parts_of(config, config.world_size)) > 1


def rollout_job_engines(config: RunConfig, placement: Placement, job: int) -> range:
    """Engines of a rollout job. ``job``: its number, from 0."""
    each = config.rollout_job_nodes * config.resources.ranks_per_node // placement.tp
    first = placement.num_beginning + job * each
    return range(first, first + each)


def engine_parts(placement: Placement, engines: range) -> list[range]:
    """The job's ranks of each engine."""
    firsts = map(placement.leader_of, engines)
    return [range(first, first + placement.tp) for first in firsts]


def attempt_roles(attempt: AttemptFolder, world_size: int) -> Placement | None:
    """Roles of an attempt's ranks by its saved configuration; None if all do the same, or if it cannot be read."""
    with suppress(UserError, OSError):
        return roles_of(load_config(Path(attempt.config)), world_size)
    return None

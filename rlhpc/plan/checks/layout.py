"""Checks the layout of a run on a number of nodes."""

from __future__ import annotations

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.backend import model_layout
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.checks.placement import check_roles, naming_trainers
from rlhpc.plan.checks.suitable import suits
from rlhpc.sharding.engine_shards import fits_nodes
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import backend_for

_MOST_RANKS = 2**20  # more than any cluster has


def check_layout(config: RunConfig, nodes: int, shape: ModelDescription | None) -> ParallelLayout:
    """Returns the trainers' layout on ``nodes`` nodes. Raises UserError if it or engines do not fit their ranks or the
    model (if known)."""
    world_size = nodes * config.resources.ranks_per_node
    if world_size > _MOST_RANKS:
        raise UserError(
            f"{nodes} nodes of resources.ranks_per_node {config.resources.ranks_per_node} are {world_size:,} ranks",
            where="slurm.nodes",
            remedy=f"use at most {_MOST_RANKS:,} ranks",
        )
    roles = check_roles(config, world_size)
    with naming_trainers(config):
        layout = model_layout(
            backend_for(config, shape),
            config.actor.parallel,
            roles.trainers.size,
            shape,
            lambda found: suits(config, shape, found),
        )
    if not roles.separate:
        _check_engines(config.rollout.tp, world_size, config.resources.ranks_per_node)
    if shape:
        check_engine(shape, config.rollout)
    return layout


def _check_engines(tp: int, world_size: int, ranks_per_node: int) -> None:
    """Refuses engines that leave some of all ranks over, or are on parts of several nodes."""
    if world_size % tp:
        raise UserError(
            f"engines of {tp} ranks do not divide the {world_size} ranks of the job",
            where="rollout.tp",
            remedy=f"use one of {divisors(world_size)}",
        )
    if not fits_nodes(tp, ranks_per_node):
        valid = [size for size in divisors(world_size) if fits_nodes(size, ranks_per_node)]
        raise UserError(
            f"engines of {tp} ranks neither divide a node of {ranks_per_node} nor take whole nodes",
            where="rollout.tp",
            remedy=f"use one of {valid}",
        )

"""Checks of the layout of a run on a number of nodes."""

from __future__ import annotations

from contextlib import suppress

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.backend import model_layout
from rlhpc.plan.checks.parallelism import check_engine, parallel_of
from rlhpc.plan.checks.placement import check_roles, naming_trainers
from rlhpc.plan.checks.training import check_memory
from rlhpc.plan.estimates.hardware import linked_ranks, named_gpu, read_site
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.sharding.engine_shards import fits_nodes
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import backend_for


def suits(config: RunConfig, shape: ModelDescription | None, layout: ParallelLayout) -> bool:
    """True if a run of ``config`` with this layout of the actor would start; memory counts if a GPU is named."""
    if not _is_fed(config, layout):
        return False
    if not isinstance(shape, ModelShape):
        return True
    with suppress(UserError):
        gpu = named_gpu(config, read_site(config))
        ranks, asked = config.resources.ranks_per_node, config.actor.parallel
        linked = linked_ranks(ranks, gpu)
        for axis in ("tp", "etp"):
            size = layout.size(axis)
            if ranks % size and not size <= linked > ranks and size != getattr(asked, axis):
                return False
        check_memory(config.actor.memory, shape, layout)
        if gpu is None:
            return True
        actor = config.actor.model_copy(update={"parallel": parallel_of(asked, layout)})
        tried = config.model_copy(update={"actor": actor})
        return predict_memory(tried, shape, layout, gpu.memory_gib, gpu.reserves).first_too_large is None
    return False


def _is_fed(config: RunConfig, layout: ParallelLayout) -> bool:
    """True if every data-parallel rank gets a sample of each minibatch."""
    train, sft = config.train, config.sft
    samples = train.prompts_per_step * config.rollout.samples_per_prompt
    return (not train.steps or samples // train.minibatches >= layout.dp) and (
        sft is None or sft.sequences_per_step >= layout.dp
    )


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

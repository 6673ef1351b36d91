"""Connects the trainers' ranks with those of engines and judges. Part of the composition root."""

from __future__ import annotations

import torch

from rlhpc.api import RolloutEngine, TrainBackend
from rlhpc.config.model_settings import models_on
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox, ObjectChannel, open_channel
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import job_store
from rlhpc.reshard.discovered import GroupExchange, discover_sides
from rlhpc.reshard.sides import SyncSides, sync_sides
from rlhpc.reshard.staged.exchange import StoreExchange
from rlhpc.reshard.staged.job import StagedJob
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.rollout.schedule.terms import terms_of
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.placement import Placement
from rlhpc.trainer.backends import actor_cut
from rlhpc.trainer.engine_side import EngineSide, Link
from rlhpc.trainer.judge_side import JudgeSide
from rlhpc.trainer.roles import Models


def connect_engines(config: RunConfig, context: RankContext, placement: Placement, models: Models) -> EngineSide:
    """The trainers' end. Collective over all of the job's ranks."""
    info = context.info
    link = _link(info, placement) if info.rank == 0 else None
    actor = models.actor.model
    job = staged_job(config, info)
    source = WeightSource(actor, job_sides(config, actor.shape, placement, job, actor=actor), config.reshard, job)
    return EngineSide(source, terms_of(config, placement.num_engines, placement.num_lenders), link)


def _link(info: RankInfo, placement: Placement) -> Link:
    leaders = [placement.engines.first + engine * placement.tp for engine in range(placement.num_engines)]
    inbox = Inbox()
    channels = [engine_channel(info, engine, placement, inbox) for engine in range(placement.num_engines)]
    return Link(Board(job_store()), inbox, channels, EngineActivity(leaders))


def engine_channel(info: RankInfo, engine: int, placement: Placement, inbox: Inbox) -> ObjectChannel:
    """Between the trainers' first rank and that of an engine."""
    ends = (placement.trainers.first, placement.engines.first + engine * placement.tp)
    return open_channel(job_store(), f"engine {engine}", ends, info.job_rank, inbox)


def lenders_of(config: RunConfig, placement: Placement) -> int:
    """Number of engines on trainers' ranks; none if they have no time to generate."""
    return placement.num_lenders if config.asynchrony.costs.lend_seconds else 0


def lender_channel(info: RankInfo, lender: int, placement: Placement, inbox: Inbox | None = None) -> ObjectChannel:
    """Between the first rank of a lender, an engine on trainers' ranks, and that of the engine whose requests it
    continues."""
    engine = lender % placement.num_engines
    ends = (placement.trainers.first + lender * placement.tp, placement.engines.first + engine * placement.tp)
    return open_channel(job_store(), f"lender {lender}", ends, info.job_rank, inbox)


def connect_judges(config: RunConfig, info: RankInfo, placement: Placement) -> JudgeSide | None:
    """The trainers' end to judges; None without any. Collective over trainers and judges."""
    if placement.judges is None:
        return None
    return JudgeSide(models_on(config, "judges"), judge_channel(info, placement) if info.rank == 0 else None)


def judge_channel(info: RankInfo, placement: Placement) -> ObjectChannel:
    """Between the trainers' first rank and that of the judges."""
    assert placement.judges is not None, "the job has judges"
    ends = (placement.trainers.first, placement.judges.first)
    return open_channel(job_store(), "judges", ends, info.job_rank)


def job_sides(
    config: RunConfig,
    shape: ModelDescription,
    placement: Placement,
    job: StagedJob,
    *,
    actor: TrainBackend | None = None,
    engine: RolloutEngine | None = None,
) -> SyncSides:
    """Who has what of the weights, by the job's ranks. For a known family it is computed; else this rank's ``actor`` or
    ``engine`` shows it, collectively over trainers and engines."""
    trainers, engines = placement.trainers, placement.engines
    if not isinstance(shape, ModelShape):
        return discover_sides(actor, engine, StoreExchange(job, [*trainers.ranks, *engines.ranks]))
    cut = EngineLayout(config.rollout.tp, config.rollout.expert_parallel)
    return sync_sides(
        shape, actor_cut(config, trainers.size), cut, training_ranks=trainers.ranks, rollout_ranks=engines.ranks
    )


def rank_sides(config: RunConfig, actor: TrainBackend, engine: RolloutEngine) -> SyncSides:
    """The same among ranks that all train and generate, in turn. Collective over them."""
    if not isinstance(actor.shape, ModelShape):
        return discover_sides(actor, engine, GroupExchange())
    cut = EngineLayout(config.rollout.tp, config.rollout.expert_parallel)
    return sync_sides(actor.shape, actor_cut(config, actor.layout.world_size), cut)


def staged_job(config: RunConfig, info: RankInfo) -> StagedJob:
    """The job as a weight sync sees it."""
    dtype = getattr(torch, config.model.dtype)
    return StagedJob(info.job_rank, config.resources.ranks_per_node, dtype, device(), job_store())

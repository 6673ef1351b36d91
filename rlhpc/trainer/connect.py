"""Connects the trainers' ranks with those of engines and judges. Part of the composition root."""

from __future__ import annotations

import torch

from rlhpc.config.model_settings import models_on
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox, ObjectChannel, open_channel
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import job_store
from rlhpc.reshard.sides import SyncSides, sync_sides
from rlhpc.reshard.staged.job import StagedJob
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.rollout.schedule.terms import terms_of
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import make_layout
from rlhpc.sharding.placement import Placement
from rlhpc.trainer.engine_side import EngineSide, Link
from rlhpc.trainer.judge_side import JudgeSide
from rlhpc.trainer.roles import Models


def connect_engines(config: RunConfig, context: RankContext, placement: Placement, models: Models) -> EngineSide:
    """The trainers' end. Collective over all of the job's ranks."""
    info = context.info
    link = _link(info, placement) if info.rank == 0 else None
    actor = models.actor.model
    source = WeightSource(
        actor, sync_sides_of(config, actor.shape, placement), config.reshard, staged_job(config, info)
    )
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


def sync_sides_of(config: RunConfig, shape: ModelShape, placement: Placement) -> SyncSides:
    """Who has what of the weights, by the job's ranks."""
    trainers, engines = placement.trainers, placement.engines
    layout = make_layout(config.actor.parallel, trainers.size)
    cut = EngineLayout(config.rollout.tp, config.rollout.expert_parallel)
    return sync_sides(shape, layout, cut, training_ranks=trainers.ranks, rollout_ranks=engines.ranks)


def staged_job(config: RunConfig, info: RankInfo) -> StagedJob:
    """The job as a weight sync sees it."""
    dtype = getattr(torch, config.model.dtype)
    return StagedJob(info.job_rank, config.resources.ranks_per_node, dtype, device(), job_store())

"""Connects the trainers' ranks with those of engines and judges. Part of the composition root."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlhpc.api import RolloutEngine, TrainBackend
from rlhpc.config.model_settings import models_on
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import (
    Inbox,
    ObjectChannel,
    open_channel,
    open_channel_of_expendable,
    open_expendable_channel,
)
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import job_store
from rlhpc.parallel.pairs import PairLimits
from rlhpc.reshard.discovered import GroupExchange, discover_sides
from rlhpc.reshard.sides import SyncSides, sync_sides
from rlhpc.reshard.staged.job import StagedJob, StoreExchange
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.rollout.schedule.terms import terms_of
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.placement import Placement, receiving_together
from rlhpc.trainer.backends import actor_cut
from rlhpc.trainer.engine_desk import Link
from rlhpc.trainer.engine_side import EngineSide
from rlhpc.trainer.judge_side import JudgeSide
from rlhpc.trainer.rejoin import JOIN_SECONDS, Joining
from rlhpc.trainer.roles import Models


def connect_engines(config: RunConfig, context: RankContext, placement: Placement, models: Models) -> EngineSide:
    """The trainers' end. Collective over all of the job's ranks."""
    info = context.info
    wires = EngineWires(config, info, placement)
    link = _link(context, placement, wires) if info.rank == 0 else None
    actor = models.actor.model
    job = replace(staged_job(config, info), absent=placement.joining_ranks)
    source = WeightSource(actor, job_sides(config, actor.shape, placement, job, actor=actor), config.reshard, job)
    terms = terms_of(config, placement.num_engines, placement.num_lenders)
    return EngineSide(source, terms, link, config.asynchrony.replay, placement, config.recovery.slow_engine_seconds)


def _link(context: RankContext, placement: Placement, wires: EngineWires) -> Link:
    leaders = [placement.leader_of(engine) for engine in range(placement.num_engines)]
    inbox = Inbox()
    channels = [wires.open(Joining(engine, 0), inbox) for engine in range(placement.num_beginning)]
    board, activity = Board(job_store()), EngineActivity(leaders)
    return Link(board, inbox, channels, activity, context.attempt, lambda joining: wires.open(joining, inbox))


@dataclass(frozen=True)
class EngineWires:
    """Channels between the trainers' first rank and those of engines, as one of these ranks opens them."""

    config: RunConfig
    info: RankInfo
    placement: Placement

    def open(self, joining: Joining, inbox: Inbox) -> ObjectChannel:
        """The channel of an engine. Collective over both ends."""
        placement, engine = self.placement, joining.engine
        ends = (placement.trainers.first, placement.leader_of(engine))
        name = f"engine {engine} {joining.generation}"
        if not self.config.may_lose_engines:
            return open_channel(job_store(), name, ends, self.info.job_rank, inbox)
        seconds = self.config.recovery.engine_timeout_seconds
        limits = PairLimits(seconds, JOIN_SECONDS if joining.generation else None)
        make = open_channel_of_expendable if self.info.role == "engines" else open_expendable_channel
        return make(job_store(), name, ends, self.info.job_rank, inbox, limits)


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
    """Shards of the weights by the job's ranks. For a known family it is computed; else this rank's ``actor`` or
    ``engine`` shows it, collectively over trainers and engines."""
    trainers, engines = placement.trainers, placement.engines
    if not isinstance(shape, ModelShape):
        if placement.num_joining:
            raise UserError(
                "set, but the layout of this architecture is found out together with all engines",
                where="slurm.rollout_jobs",
                remedy="leave it out",
            )
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
    job = StagedJob(info.job_rank, receiving_together(config), dtype, device(), job_store(), info.generation)
    if not config.may_lose_engines:
        return job
    # Trainers that wait for another engine are silent for as long as they would wait for this one.
    silence = None if info.role == "engines" else config.recovery.engine_timeout_seconds
    return replace(job, limits=PairLimits(silence, JOIN_SECONDS))

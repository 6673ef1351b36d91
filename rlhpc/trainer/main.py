"""A rank's program: join the others, build, run."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.context import RankContext
from rlhpc.core.heartbeat import enter
from rlhpc.sharding.placement import placement_of


def run_rank(context: RankContext, *, saves_end: bool = True) -> str | None:
    """Runs this rank with the resolved config of its attempt, from the newest checkpoint if there is one.

    A run without steps is an evaluation. Without ``saves_end`` there is no checkpoint after the last step, for runs
    that only measure.

    Returns why the ranks agreed to stop before the last step, None if they did not.
    """
    from rlhpc.parallel.groups import leave
    from rlhpc.trainer.build import build
    from rlhpc.trainer.loop import Loop

    config, context = _join(context)
    if context.info.role == "engines":
        from rlhpc.trainer.engine_rank import run_engine

        reason = run_engine(config, context)
        leave()
        return reason
    if context.info.role == "judges":
        from rlhpc.trainer.judge_rank import run_judge

        reason = run_judge(config, context)
        leave()
        return reason
    run = build(config, context)
    stopped = None
    if config.evaluates_only:
        assert run.evaluator is not None, "a run without steps has held-out prompts"
        run.evaluator.evaluate()
    else:
        stopped = Loop(run, saves_end=saves_end).run()
    run.close()
    leave()
    return stopped


def _join(context: RankContext) -> tuple[RunConfig, RankContext]:
    """Joins the other ranks of the same role; returns the configuration, which all agree on, and
    the context with this rank's place in its role."""
    import torch

    from rlhpc.parallel.agreement import check_job_agreement
    from rlhpc.parallel.groups import join, last_collectives
    from rlhpc.parallel.store import beyond
    from rlhpc.trainer.handshake import agreed_facts, follow_trainers

    config = load_config(context.attempt.config)
    info = context.info
    placement = placement_of(config, info.job_size)
    if placement.separate:
        world = placement.world_of(info.job_rank, elastic=config.may_lose_engines)
        info = info.in_role(world.name, world.first, world.size)
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s rank {info.job_rank} %(name)s: %(message)s",
        force=True,
    )
    torch.set_num_threads(int(os.environ.get(env.OMP_NUM_THREADS, "1")))
    enter("connecting")
    limit = beyond(config.recovery.hang_timeout_seconds, config.recovery.start_seconds)
    join(info, limit / 60, verify_connections=config.slurm.verify_connections)
    info = follow_trainers(config, info, placement)
    check_job_agreement(info, agreed_facts(config, context.attempt), placement.beginning_ranks)
    context.heartbeat.watch_collectives(last_collectives)
    return config, replace(context, info=info)

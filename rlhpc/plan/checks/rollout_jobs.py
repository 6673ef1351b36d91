"""Checks of runs with rollout jobs, whose engines join and leave while the trainers' job goes on."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.jobs import RolloutJobsSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError

_KEY = "slurm.rollout_jobs"


def rollout_job_faults(config: RunConfig) -> Iterator[UserError]:
    """Settings with which engines cannot be in jobs of their own."""
    jobs = config.slurm.rollout_jobs
    if jobs is None:
        return
    if not config.may_lose_engines:
        yield UserError(
            f"set, but with placement {config.placement} and recovery.lost_engines {config.recovery.lost_engines} "
            "the run needs all of its ranks",
            where=_KEY,
            remedy="set placement to separate and recovery.lost_engines to rejoin, or leave it out",
        )
        return
    if config.asynchrony.replay is not None:
        yield UserError(
            "set, but a replay has all engines from its beginning",
            where=_KEY,
            remedy="leave it out, or replay with --replay, which does",
        )
    elif config.asynchrony.schedule != "arrival":
        yield UserError(
            f"{config.asynchrony.schedule}, but engines of rollout jobs join at times that no order foresees",
            where="asynchrony.schedule",
            remedy=f"set it to arrival, or leave {_KEY} out",
        )
    if not isinstance(config.slurm.nodes, int):
        yield UserError(
            f"{list(config.slurm.nodes)}, but with {_KEY} it is one number: that of the nodes of all jobs",
            where="slurm.nodes",
            remedy="set one number",
        )
    yield from _size_faults(config, jobs)


def _size_faults(config: RunConfig, jobs: RolloutJobsSection) -> Iterator[UserError]:
    per_node, tp, nodes = config.resources.ranks_per_node, config.rollout.tp, config.rollout.nodes
    if nodes is None:
        yield UserError(
            f"not set, but {_KEY} counts in nodes",
            where="rollout.nodes",
            remedy="set it in place of rollout.ranks",
        )
        return
    if jobs.nodes is None and nodes % jobs.count:
        yield UserError(
            f"{jobs.count} does not divide rollout.nodes {nodes}",
            where=f"{_KEY}.count",
            remedy=f"use a divisor, or set {_KEY}.nodes; other engines are in the trainers' job",
        )
    elif config.all_rollout_job_nodes > nodes:
        yield UserError(
            f"{jobs.nodes} of each of {jobs.count} jobs are more than rollout.nodes {nodes}",
            where=f"{_KEY}.nodes",
            remedy=f"set it to {nodes // jobs.count or 1} or less, or raise rollout.nodes and slurm.nodes",
        )
    elif config.rollout_job_nodes * per_node % tp:
        yield UserError(
            f"a rollout job of {config.rollout_job_nodes} nodes of {per_node} ranks has no whole engines of {tp}",
            where="rollout.tp",
            remedy=f"use a divisor of {config.rollout_job_nodes * per_node}",
        )

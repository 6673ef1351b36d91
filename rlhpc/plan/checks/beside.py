"""Checks the models beside the actor, on the ranks that train or on judges."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.critic import check_critic
from rlhpc.plan.checks.judges import check_judges_work, check_reference, naming_judges
from rlhpc.plan.checks.placement import naming_trainers
from rlhpc.plan.checks.rewards import check_reward_model
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.placement import judge_ranks, ranks_with


def check_beside(
    config: RunConfig, shape: ModelDescription | None, layout: ParallelLayout, faults: Faults, *, rewards: bool
) -> None:
    """Collects the faults of critic and reference, with ``rewards`` of the reward model, and of judges' work.
    ``layout``: the actor's."""
    known, reward = len(faults.errors), config.reward_model
    with faults.collect(), _naming(config, config.critic.on):
        check_critic(config, ranks_with(config, config.critic.on, layout.world_size), shape)
    with faults.collect():
        check_reference(config, shape)
    if rewards and reward is not None:
        with faults.collect(), _naming(config, reward.on):
            check_reward_model(config, ranks_with(config, reward.on, layout.world_size))
    if len(faults.errors) == known:
        with faults.collect():
            check_judges_work(config)


def _naming(config: RunConfig, on: str) -> AbstractContextManager[None]:
    """Context in which errors of layouts name the ranks that a model is on."""
    return naming_judges(config) if on == "judges" and judge_ranks(config) else naming_trainers(config)

"""Builds the models of a run on this rank: the actor, and those beside it. Part of the composition root."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.algo import Algorithm
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.config.model_settings import (
    ModelSettings,
    actor_settings,
    beside_engine,
    critic_settings,
    reference_settings,
    reward_model_settings,
)
from rlhpc.config.reward import RewardModelSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.heartbeat import enter
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape, read_model
from rlhpc.parallel.groups import Groups, build_groups
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.trainer.roles import Models, Role


def make_models(config: RunConfig, info: RankInfo, shape: ModelShape, algorithm: Algorithm | None) -> Models:
    """Builds the models that the phases and the algorithm (None: no RL) need. Collective."""
    enter("building the models")
    layout = make_layout(config.actor.parallel, info.world_size)
    build_groups(layout, config.seed)
    train = config.train
    optimizer = config.sft.optimizer if config.sft else config.actor.optimizer if train.steps else None
    forward = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    model = _model(config, info, shape, layout, replace(actor_settings(config), optimizer=optimizer))
    actor = Role(model, info.rank, train.tokens_per_microbatch, forward, config.actor.moe.router_replay)
    generates = algorithm is not None or bool(config.data.validation)
    if generates:
        actor.model.offload()  # makes room for the other models
    scorer = config.reward_model if generates and config.reward_model_on == "trainers" else None
    reward = _reward_model(config, scorer, info, layout, forward) if scorer is not None else None
    if algorithm is None:
        return Models(actor, reward=reward)
    reference = critic = None
    if algorithm.needs_reference(config.algorithm) and config.reference_on == "trainers":
        model = _model(config, info, shape, layout, reference_settings(config))
        reference = replace(actor, model=model, router_replay=False)
    if algorithm.needs_critic:
        tokens = config.critic.tokens_per_microbatch or train.tokens_per_microbatch
        critic = Role(_critic(config, info, shape, layout), info.rank, tokens, tokens)
    return Models(actor, reference, critic, reward)


def models_beside_engine(
    config: RunConfig, info: RankInfo, shape: ModelShape, algorithm: Algorithm
) -> tuple[Role | None, Role | None]:
    """Builds the reference and the reward model that engines have beside them. Collective over all engines."""
    tp, train = config.rollout.tp, config.train
    with_reference = algorithm.needs_reference(config.algorithm) and config.reference_on == "engines"
    with_reward = config.reward_model is not None and config.reward_model_on == "engines"
    if not with_reference and not with_reward:
        return None, None
    enter("building the models")
    forward = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    settings = beside_engine(reference_settings(config), tp, experts=shape.experts is not None)
    layout = make_layout(settings.parallel, info.world_size)
    build_groups(layout, config.seed)
    reference = reward = None
    if with_reference:
        model = _model(config, info, shape, layout, settings)
        reference = Role(model, info.rank % tp, forward, forward, alone=True)
    if with_reward:
        assert config.reward_model is not None
        made = _reward_model(config, config.reward_model, info, layout, forward)
        reward = replace(made, rank=info.rank % tp, alone=True)
    return reference, reward


def make_trained(config: RunConfig, info: RankInfo, name: str) -> Role:
    """The actor or the critic alone, with its initial weights and an optimizer. Collective."""
    shape = read_model(config.model.path, config.model.family)
    layout = make_layout(config.actor.parallel, info.world_size)
    build_groups(layout, config.seed)
    tokens = config.train.tokens_per_microbatch
    if name == "critic":
        return Role(_critic(config, info, shape, layout), info.rank, tokens, tokens)
    model = _model(config, info, shape, layout, actor_settings(config))
    return Role(model, info.rank, tokens, tokens, config.actor.moe.router_replay)


def _model(
    config: RunConfig, info: RankInfo, shape: ModelShape, layout: ParallelLayout, settings: ModelSettings
) -> MegatronBackend:
    backend = MegatronBackend(shape, layout, info, config.model.dtype, settings)
    backend.load_pretrained(config.model.weights or config.model.path)
    if settings.optimizer is None:
        backend.offload()
    return backend


def _critic(config: RunConfig, info: RankInfo, shape: ModelShape, actor: ParallelLayout) -> MegatronBackend:
    """The second model that is trained."""
    folder = config.critic.path or config.model.weights or config.model.path
    if config.critic.path is not None:
        shape = read_model(folder, classifier=True)
    critic = _model_with_value_head(config, info, shape, actor, critic_settings(config))
    critic.load_pretrained(folder)
    critic.offload()
    return critic


def _reward_model(
    config: RunConfig, section: RewardModelSection, info: RankInfo, actor: ParallelLayout, forward: int
) -> Role:
    shape = read_model(section.model, classifier=True)
    settings = reward_model_settings(config)
    if config.reward_model_on == "engines":
        settings = beside_engine(settings, config.rollout.tp, experts=shape.experts is not None)
    model = _model_with_value_head(config, info, shape, actor, settings)
    model.load_pretrained(section.model)
    model.offload()
    tokens = section.tokens_per_microbatch or forward
    return Role(model, info.rank, tokens, tokens)


def _model_with_value_head(
    config: RunConfig, info: RankInfo, shape: ModelShape, actor: ParallelLayout, settings: ModelSettings
) -> MegatronBackend:
    """A model with a value head, in process groups of its own if its layout differs from the actor's."""
    layout = make_layout(settings.parallel, info.world_size)
    groups = Groups(layout) if layout != actor else None
    return MegatronBackend(shape.with_value_head, layout, info, config.model.dtype, settings, groups)

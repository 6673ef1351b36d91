"""Builds the models of a run on this rank: the actor, and those beside it. Part of the composition root."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.algo import Algorithm
from rlhpc.backends.kernels.compiled import choose_compilation
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.config.model_settings import (
    ModelSettings,
    actor_settings,
    beside_engine,
    critic_settings,
    models_on,
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
from rlhpc.trainer.roles import JudgeModels, Models, Role


def make_models(config: RunConfig, info: RankInfo, shape: ModelShape, algorithm: Algorithm | None) -> Models:
    """Builds the models that the phases and the algorithm (None: no RL) need on a rank that trains. Collective."""
    enter("building the models")
    judged = models_on(config, "judges")
    layout = make_layout(config.actor.parallel, info.world_size)
    build_groups(layout, config.seed)
    train, forward = config.train, _forward_tokens(config)
    optimizer = config.sft.optimizer if config.sft else config.actor.optimizer if train.steps else None
    model = _model(config, info, shape, layout, replace(actor_settings(config), optimizer=optimizer))
    actor = Role(model, info.rank, train.tokens_per_microbatch, forward, config.actor.moe.router_replay)
    generates = algorithm is not None or bool(config.data.validation)
    if generates:
        actor.model.offload()  # makes room for the other models
    scorer = config.reward_model if generates and config.reward_model_on == "trainers" else None
    reward = _reward_model(config, scorer, info, layout) if scorer is not None else None
    if algorithm is None:
        return Models(actor, reward=reward)
    reference = critic = None
    if algorithm.needs_reference(config.algorithm) and config.reference_on == "trainers":
        model = _model(config, info, shape, layout, reference_settings(config))
        reference = replace(actor, model=model, router_replay=False)
    if algorithm.needs_critic and "critic" not in judged:
        critic = _critic_role(config, info, shape, layout)
    return Models(actor, reference, critic, reward)


def models_beside_engine(
    config: RunConfig, info: RankInfo, shape: ModelShape, algorithm: Algorithm
) -> tuple[Role | None, Role | None]:
    """Builds the reference and the reward model that engines have beside them. Collective over all engines."""
    tp = config.rollout.tp
    with_reference = algorithm.needs_reference(config.algorithm) and config.reference_on == "engines"
    with_reward = config.reward_model is not None and config.reward_model_on == "engines"
    if not with_reference and not with_reward:
        return None, None
    enter("building the models")
    forward = _forward_tokens(config)
    settings = beside_engine(reference_settings(config), tp, experts=shape.experts is not None)
    layout = make_layout(settings.parallel, info.world_size)
    build_groups(layout, config.seed)
    reference = reward = None
    if with_reference:
        model = _model(config, info, shape, layout, settings)
        reference = Role(model, info.rank % tp, forward, forward, alone=True)
    if with_reward:
        assert config.reward_model is not None
        made = _reward_model(config, config.reward_model, info, layout)
        reward = replace(made, rank=info.rank % tp, alone=True)
    return reference, reward


def make_judge_models(config: RunConfig, info: RankInfo, shape: ModelShape) -> JudgeModels:
    """Builds the models of a rank of judges. Collective."""
    enter("building the models")
    names = models_on(config, "judges")
    settings = {"reference": reference_settings, "critic": critic_settings, "reward model": reward_model_settings}
    layout = make_layout(settings[names[0]](config).parallel, info.world_size)
    build_groups(layout, config.seed)
    models = JudgeModels()
    if config.reward_model is not None and "reward model" in names:
        models.reward = _reward_model(config, config.reward_model, info, layout)
    if "reference" in names:
        model = _model(config, info, shape, layout, reference_settings(config))
        models.reference = Role(model, info.rank, config.train.tokens_per_microbatch, _forward_tokens(config))
    if "critic" in names:
        models.critic = _critic_role(config, info, shape, layout)
    return models


def make_trained(config: RunConfig, info: RankInfo, name: str) -> Role:
    """The actor or the critic alone, with its initial weights and an optimizer. Collective."""
    shape = read_model(config.model.path, config.model.family)
    settings = critic_settings(config) if name == "critic" else actor_settings(config)
    layout = make_layout(settings.parallel, info.world_size)
    build_groups(layout, config.seed)
    if name == "critic":
        return _critic_role(config, info, shape, layout)
    tokens = config.train.tokens_per_microbatch
    model = _model(config, info, shape, layout, settings)
    return Role(model, info.rank, tokens, tokens, config.actor.moe.router_replay)


def _forward_tokens(config: RunConfig) -> int:
    """Maximum tokens per rank of a microbatch without gradient."""
    return config.train.log_prob_tokens_per_microbatch or config.train.tokens_per_microbatch


def _model(
    config: RunConfig, info: RankInfo, shape: ModelShape, active: ParallelLayout, settings: ModelSettings
) -> MegatronBackend:
    backend = _backend(config, info, shape, active, settings)
    backend.load_pretrained(config.model.weights or config.model.path)
    if settings.optimizer is None:
        backend.offload()
    return backend


def _critic_role(config: RunConfig, info: RankInfo, shape: ModelShape, active: ParallelLayout) -> Role:
    """The second model that is trained."""
    tokens = config.critic.tokens_per_microbatch or config.train.tokens_per_microbatch
    folder = config.critic.path or config.model.weights or config.model.path
    if config.critic.path is not None:
        shape = read_model(folder, classifier=True)
    critic = _backend(config, info, shape.with_value_head, active, critic_settings(config))
    critic.load_pretrained(folder)
    critic.offload()
    return Role(critic, info.rank, tokens, tokens)


def _reward_model(config: RunConfig, section: RewardModelSection, info: RankInfo, active: ParallelLayout) -> Role:
    shape = read_model(section.model, classifier=True)
    settings = reward_model_settings(config)
    if config.reward_model_on == "engines":
        settings = beside_engine(settings, config.rollout.tp, experts=shape.experts is not None)
    model = _backend(config, info, shape.with_value_head, active, settings)
    model.load_pretrained(section.model)
    model.offload()
    tokens = section.tokens_per_microbatch or _forward_tokens(config)
    return Role(model, info.rank, tokens, tokens)


def _backend(
    config: RunConfig, info: RankInfo, shape: ModelShape, active: ParallelLayout, settings: ModelSettings
) -> MegatronBackend:
    """A model in process groups of its own if its layout differs from that of the active ones."""
    layout = make_layout(settings.parallel, info.world_size)
    groups = Groups(layout) if layout != active else None
    choose_compilation(config.train.compile)
    return MegatronBackend(shape, layout, info, config.model.dtype, settings, groups)

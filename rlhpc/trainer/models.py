"""Builds the models of a run on this rank: the actor, and those beside it. Part of the composition root."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.algo import Algorithm
from rlhpc.api import TrainBackend
from rlhpc.checkpoint.formats.described import resolve_value_model
from rlhpc.config.model_settings import (
    ModelSettings,
    actor_settings,
    critic_settings,
    models_on,
    reference_settings,
    reward_model_settings,
)
from rlhpc.config.reward import RewardModelSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.core.heartbeat import enter
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelDescription
from rlhpc.trainer.backends import Backends, open_backends
from rlhpc.trainer.roles import JudgeModels, Models, Role


def make_models(config: RunConfig, info: RankInfo, shape: ModelDescription, algorithm: Algorithm | None) -> Models:
    """Builds the models that the phases and the algorithm (None: no RL) need on a rank that trains. Collective."""
    enter("building the models")
    judged = models_on(config, "judges")
    backends = open_backends(config, info, config.actor.parallel)
    train, forward = config.train, _forward_tokens(config)
    optimizer = config.sft.optimizer if config.sft else config.actor.optimizer if train.steps else None
    model = _model(config, backends, shape, replace(actor_settings(config), optimizer=optimizer))
    actor = Role(model, info.rank, train.tokens_per_microbatch, forward, config.actor.moe.router_replay)
    generates = algorithm is not None or bool(config.data.validation)
    if generates:
        actor.model.offload()  # makes room for the other models
    scorer = config.reward_model if generates and config.reward_model_on == "trainers" else None
    reward = _reward_model(config, scorer, info, backends) if scorer is not None else None
    if algorithm is None:
        return Models(actor, reward=reward, backends=backends)
    reference = critic = None
    if algorithm.needs_reference(config.algorithm) and config.reference_on == "trainers":
        model = _model(config, backends, shape, reference_settings(config))
        reference = replace(actor, model=model, router_replay=False)
    if algorithm.needs_critic and "critic" not in judged:
        critic = _critic_role(config, info, shape, backends)
    return Models(actor, reference, critic, reward, backends=backends)


def models_beside_engine(
    config: RunConfig, info: RankInfo, shape: ModelDescription, algorithm: Algorithm
) -> tuple[Role | None, Role | None]:
    """Builds the reference and the reward model that engines have beside them. Collective over all engines."""
    tp = config.rollout.tp
    with_reference = algorithm.needs_reference(config.algorithm) and config.reference_on == "engines"
    with_reward = config.reward_model is not None and config.reward_model_on == "engines"
    if not with_reference and not with_reward:
        return None, None
    enter("building the models")
    forward = _forward_tokens(config)
    backends = open_backends(config, info, ParallelSection(tp=tp, etp=tp if shape.experts is not None else 1))
    settings = backends.beside_engine(reference_settings(config), tp, experts=shape.experts is not None)
    reference = reward = None
    if with_reference:
        model = _model(config, backends, shape, settings)
        reference = Role(model, info.rank % tp, forward, forward, alone=True)
    if with_reward:
        assert config.reward_model is not None
        made = _reward_model(config, config.reward_model, info, backends)
        reward = replace(made, rank=info.rank % tp, alone=True)
    return reference, reward


def make_judge_models(config: RunConfig, info: RankInfo, shape: ModelDescription) -> JudgeModels:
    """Builds the models of a rank of judges. Collective."""
    enter("building the models")
    names = models_on(config, "judges")
    settings = {"reference": reference_settings, "critic": critic_settings, "reward model": reward_model_settings}
    backends = open_backends(config, info, settings[names[0]](config).parallel)
    models = JudgeModels(backends=backends)
    if config.reward_model is not None and "reward model" in names:
        models.reward = _reward_model(config, config.reward_model, info, backends)
    if "reference" in names:
        model = _model(config, backends, shape, reference_settings(config))
        models.reference = Role(model, info.rank, config.train.tokens_per_microbatch, _forward_tokens(config))
    if "critic" in names:
        models.critic = _critic_role(config, info, shape, backends)
    return models


def _forward_tokens(config: RunConfig) -> int:
    """Maximum tokens per rank of a microbatch without gradient."""
    return config.train.log_prob_tokens_per_microbatch or config.train.tokens_per_microbatch


def _model(config: RunConfig, backends: Backends, shape: ModelDescription, settings: ModelSettings) -> TrainBackend:
    backend = backends.build(shape, config.model.path, settings)
    backend.load_pretrained(config.model.weights or config.model.path)
    if settings.optimizer is None:
        backend.offload()
    return backend


def _critic_role(config: RunConfig, info: RankInfo, shape: ModelDescription, backends: Backends) -> Role:
    """The second model that is trained."""
    tokens = config.critic.tokens_per_microbatch or config.train.tokens_per_microbatch
    path, weights = config.model.path, config.model.weights or config.model.path
    if config.critic.path is not None:
        path = weights = config.critic.path
        shape = resolve_value_model(config, path)
    critic = backends.build(shape.with_value_head, path, critic_settings(config))
    critic.load_pretrained(weights)
    critic.offload()
    return Role(critic, info.rank, tokens, tokens)


def _reward_model(config: RunConfig, section: RewardModelSection, info: RankInfo, backends: Backends) -> Role:
    shape = resolve_value_model(config, section.model)
    settings = reward_model_settings(config)
    if config.reward_model_on == "engines":
        settings = backends.beside_engine(settings, config.rollout.tp, experts=shape.experts is not None)
    model = backends.build(shape, section.model, settings)
    model.load_pretrained(section.model)
    model.offload()
    tokens = section.tokens_per_microbatch or _forward_tokens(config)
    return Role(model, info.rank, tokens, tokens)

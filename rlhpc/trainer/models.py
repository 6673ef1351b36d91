"""The models of a run on this rank: the actor, and those beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhpc.algo import Algorithm
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.config.model_settings import (
    ModelSettings,
    actor_settings,
    critic_settings,
    reference_settings,
    reward_model_settings,
)
from rlhpc.config.schema import RunConfig
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape, read_model
from rlhpc.parallel.groups import Groups, build_groups
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.trainer.roles import Role


@dataclass(frozen=True)
class Models:
    """Each with the layout it is cut by and the sizes of its batches."""

    actor: Role
    reference: Role | None = None  # frozen
    critic: Role | None = None
    reward: Role | None = None  # frozen

    @property
    def layout(self) -> ParallelLayout:
        """The actor's, whose process groups are in force."""
        return self.actor.layout


def make_models(config: RunConfig, info: RankInfo, shape: ModelShape, algorithm: Algorithm | None) -> Models:
    """Build what the phases and the algorithm (None: no RL) need. Collective."""
    layout = make_layout(config.actor.parallel, info.world_size)
    build_groups(layout, config.seed)
    train = config.train
    optimizer = config.sft.optimizer if config.sft else config.actor.optimizer if train.steps else None
    passing = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    actor = Role(
        _model(config, info, shape, layout, replace(actor_settings(config), optimizer=optimizer)),
        train.tokens_per_microbatch,
        passing,
    )
    if algorithm is not None or config.data.validation:
        actor.model.offload()  # the other models are made beside it, and an engine that wants its share of the GPU free
    scores = config.reward_model is not None and (algorithm is not None or bool(config.data.validation))
    reward = _reward_model(config, info, layout, passing) if scores else None
    if algorithm is None:
        return Models(actor, reward=reward)
    reference = critic = None
    if algorithm.needs_reference(config.algorithm):
        reference = replace(actor, model=_model(config, info, shape, layout, reference_settings(config)))
    if algorithm.needs_critic:
        tokens = config.critic.tokens_per_microbatch or train.tokens_per_microbatch
        critic = Role(_critic(config, info, shape, layout), tokens, tokens)
    return Models(actor, reference, critic, reward)


def make_trained(config: RunConfig, info: RankInfo, name: str) -> Role:
    """The actor or the critic alone, with its initial weights and an optimizer. Collective."""
    shape = read_model(config.model.path, config.model.family)
    layout = make_layout(config.actor.parallel, info.world_size)
    build_groups(layout, config.seed)
    tokens = config.train.tokens_per_microbatch
    if name == "critic":
        return Role(_critic(config, info, shape, layout), tokens, tokens)
    return Role(_model(config, info, shape, layout, actor_settings(config)), tokens, tokens)


def _model(
    config: RunConfig, info: RankInfo, shape: ModelShape, layout: ParallelLayout, settings: ModelSettings
) -> MegatronBackend:
    backend = MegatronBackend(
        shape,
        layout,
        info,
        config.model.dtype,
        settings.parallel,
        settings.optimizer,
        settings.moe,
        settings.memory,
    )
    backend.load_pretrained(config.model.weights or config.model.path)
    if settings.optimizer is None:
        backend.offload()
    return backend


def _critic(config: RunConfig, info: RankInfo, shape: ModelShape, actor: ParallelLayout) -> MegatronBackend:
    """The second model that is trained."""
    folder = config.critic.path or config.model.weights or config.model.path
    if config.critic.path is not None:
        shape = read_model(folder, classifier=True)
    critic = _value_model(config, info, shape, actor, critic_settings(config))
    critic.load_pretrained(folder)
    critic.offload()
    return critic


def _reward_model(config: RunConfig, info: RankInfo, actor: ParallelLayout, passing: int) -> Role:
    section = config.reward_model
    shape = read_model(section.model, classifier=True)
    model = _value_model(config, info, shape, actor, reward_model_settings(config))
    model.load_pretrained(section.model)
    model.offload()
    tokens = section.tokens_per_microbatch or passing
    return Role(model, tokens, tokens)


def _value_model(
    config: RunConfig, info: RankInfo, shape: ModelShape, actor: ParallelLayout, settings: ModelSettings
) -> MegatronBackend:
    """A model with a value head, in groups of its own where its layout is not the actor's."""
    layout = make_layout(settings.parallel, info.world_size)
    groups = Groups(layout) if layout != actor else None
    return MegatronBackend(
        shape.with_value_head,
        layout,
        info,
        config.model.dtype,
        settings.parallel,
        settings.optimizer,
        settings.moe,
        settings.memory,
        groups,
    )

"""Builds the models of a run on this rank: the actor, and those beside it. Part of the composition root."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.algo import Algorithm
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.reward import RewardModelSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, OptimizerSection, ParallelSection
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape, read_model
from rlhpc.parallel.groups import Groups, build_groups
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.trainer.roles import Models, Role


def make_models(config: RunConfig, info: RankInfo, shape: ModelShape, algorithm: Algorithm | None) -> Models:
    """Builds the models that the phases and the algorithm (None: no RL) need. Collective."""
    layout = make_layout(config.parallel, info.world_size)
    build_groups(layout, config.seed)
    train = config.train
    optimizer = config.sft.optimizer if config.sft else train.optimizer if train.steps else None
    forward = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    model = _model(config, info, shape, layout, optimizer)
    actor = Role(model, info.rank, train.tokens_per_microbatch, forward, train.experts.router_replay)
    if algorithm is not None or config.data.validation:
        actor.model.offload()  # makes room for the other models and the engine, which expects its share of the GPU free
    generates = algorithm is not None or bool(config.data.validation)
    scorer = config.reward.model if generates else None
    reward = _reward_model(config, scorer, info, layout, forward) if scorer is not None else None
    if algorithm is None:
        return Models(actor, reward=reward)
    reference = critic = None
    if algorithm.needs_reference(config.algorithm):
        reference = replace(actor, model=_model(config, info, shape, layout, None), router_replay=False)
    if algorithm.needs_critic:
        tokens = config.critic.tokens_per_microbatch or train.tokens_per_microbatch
        critic = Role(_critic(config, info, shape, layout), info.rank, tokens, tokens)
    return Models(actor, reference, critic, reward)


def make_trained(config: RunConfig, info: RankInfo, name: str) -> Role:
    """The actor or the critic alone, with its initial weights and an optimizer. Collective."""
    shape = read_model(config.model.path, config.model.family)
    layout = make_layout(config.parallel, info.world_size)
    build_groups(layout, config.seed)
    tokens = config.train.tokens_per_microbatch
    if name == "critic":
        return Role(_critic(config, info, shape, layout), info.rank, tokens, tokens)
    model = _model(config, info, shape, layout, config.train.optimizer)
    return Role(model, info.rank, tokens, tokens, config.train.experts.router_replay)


def _model(
    config: RunConfig, info: RankInfo, shape: ModelShape, layout: ParallelLayout, optimizer: OptimizerSection | None
) -> MegatronBackend:
    settings = ModelSettings(config.parallel, config.memory, config.train.experts, optimizer)
    backend = MegatronBackend(shape, layout, info, config.model.dtype, settings)
    backend.load_pretrained(config.model.weights or config.model.path)
    if optimizer is None:
        backend.offload()
    return backend


def _critic(config: RunConfig, info: RankInfo, shape: ModelShape, actor: ParallelLayout) -> MegatronBackend:
    """The second model that is trained."""
    section = config.critic
    folder = section.model or config.model.weights or config.model.path
    if section.model is not None:
        shape = read_model(folder, classifier=True)
    memory, parallel = section.memory or config.memory, section.parallel or config.parallel
    critic = _model_with_value_head(config, info, shape, parallel, actor, section.optimizer, memory)
    critic.load_pretrained(folder)
    critic.offload()
    return critic


def _reward_model(
    config: RunConfig, section: RewardModelSection, info: RankInfo, actor: ParallelLayout, forward: int
) -> Role:
    shape = read_model(section.path, classifier=True)
    model = _model_with_value_head(config, info, shape, section.parallel or config.parallel, actor, None, config.memory)
    model.load_pretrained(section.path)
    model.offload()
    tokens = section.tokens_per_microbatch or forward
    return Role(model, info.rank, tokens, tokens)


def _model_with_value_head(
    config: RunConfig,
    info: RankInfo,
    shape: ModelShape,
    parallel: ParallelSection,
    actor: ParallelLayout,
    optimizer: OptimizerSection | None,
    memory: MemorySection,
) -> MegatronBackend:
    """A model with a value head, in process groups of its own if its layout differs from the actor's."""
    layout = make_layout(parallel, info.world_size)
    experts = config.train.experts.model_copy(update={"router_replay": False})
    groups = Groups(layout) if layout != actor else None
    settings = ModelSettings(parallel, memory, experts, optimizer)
    return MegatronBackend(shape.with_value_head, layout, info, config.model.dtype, settings, groups)

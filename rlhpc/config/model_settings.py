"""Settings of each model of a run; what its own section leaves out is the actor's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import (
    FrozenMemorySection,
    MemorySection,
    MoeSection,
    OffloadSection,
    OptimizerSection,
    ParallelSection,
)


@dataclass(frozen=True)
class ModelSettings:
    """Settings by which one model is sharded, stored and trained."""

    parallel: ParallelSection
    memory: MemorySection = field(default_factory=MemorySection)
    moe: MoeSection = field(default_factory=MoeSection)
    optimizer: OptimizerSection | None = None  # None: frozen


def models_on(config: RunConfig, ranks: str) -> tuple[str, ...]:
    """Names of the models beside the actor that RL steps have on ``trainers``, ``judges`` or ``engines``. An algorithm
    of the user's own counts as one with a critic where ``critic.on`` is not the default."""
    if not config.train.steps:
        return ()
    reward, name = config.reward_model, config.algorithm.name
    critic = name in WITH_CRITIC or (":" in name and config.critic.on != "trainers")
    found = {
        "reference": config.reference.on if config.algorithm.kl.coefficient > 0 else None,
        "critic": config.critic.on if critic else None,
        "reward model": reward.on if reward is not None else None,
    }
    return tuple(model for model, on in found.items() if on == ranks)


def models_elsewhere(config: RunConfig) -> tuple[str, ...]:
    """Names of the models beside the actor that ranks which train do not have."""
    return *models_on(config, "judges"), *models_on(config, "engines")


def actor_settings(config: RunConfig) -> ModelSettings:
    """Returns the actor's settings, with the optimizer of the RL phase."""
    actor = config.actor
    return ModelSettings(actor.parallel, actor.memory, actor.moe, actor.optimizer)


def critic_settings(config: RunConfig) -> ModelSettings:
    actor, critic = config.actor, config.critic
    moe = MoeSection(**{**(critic.moe or actor.moe).model_dump(), "router_replay": False})
    memory = critic.memory
    if memory is None:  # beside the actor it makes room as the actor does; judges have no engine and no actor
        memory = actor.memory
        if critic.on == "judges":
            memory = memory.model_copy(update={"offload": OffloadSection()})
    return ModelSettings(critic.parallel or actor.parallel, memory, moe, critic.optimizer)


def reference_settings(config: RunConfig) -> ModelSettings:
    actor, section = config.actor, config.reference
    parallel = section.parallel if section.on == "judges" else None
    return ModelSettings(parallel or actor.parallel, _frozen(config.reference.memory), actor.moe)


def beside_engine(settings: ModelSettings, tp: int, *, experts: bool) -> ModelSettings:
    """Returns the settings of a model that each engine of ``tp`` ranks has beside it; ``experts``: the model has some.
    Its forward passes need no other engine, as tokens of experts gathered from all ranks would."""
    return replace(settings, parallel=ParallelSection(tp=tp, etp=tp if experts else 1))


def reward_model_settings(config: RunConfig) -> ModelSettings:
    """Returns the reward model's settings; the configuration must have one."""
    section, actor = config.reward_model, config.actor
    assert section is not None
    moe = actor.moe.model_copy(update={"router_replay": False})
    return ModelSettings(section.parallel or actor.parallel, _frozen(section.memory or config.reference.memory), moe)


def _frozen(memory: FrozenMemorySection) -> MemorySection:
    return MemorySection(offload=OffloadSection(parameters=memory.offload))

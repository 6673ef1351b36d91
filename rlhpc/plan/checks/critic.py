"""Checks the critic's model, layout, memory and optimizer."""

from __future__ import annotations

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.model_settings import critic_settings
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import CriticSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.backend import model_layout
from rlhpc.plan.checks.training import check_memory, check_optimizer
from rlhpc.sharding.placement import backend_for


def check_critic(config: RunConfig, world_size: int, shape: ModelDescription | None) -> None:
    """Refuses what cannot work. ``shape`` is the actor's, None where its model does not exist yet."""
    section, name = config.critic, config.algorithm.name
    if ":" not in name and name not in WITH_CRITIC:
        if section != CriticSection():
            raise UserError(f"{name} has no critic", where="critic", remedy="leave the section out, or use ppo")
        return
    if not config.train.steps:
        return
    check_optimizer("critic.optimizer", section.optimizer)
    backend = backend_for(config, shape)
    if section.path is not None:
        shape = _other_model(config, shape)
    settings = critic_settings(config)
    try:
        layout = model_layout(backend, settings.parallel, world_size, shape and shape.with_value_head)
        if shape is not None:
            check_memory(settings.memory, shape, layout, backend)
    except UserError as error:
        given = [f"actor.{key}" for key in ("parallel", "memory") if getattr(section, key) is not None]
        given += ["actor.parallel"] if section.on == "judges" else []
        where, remedy = error.where, error.remedy
        if where.startswith(tuple(given)):
            where, remedy = where.replace("actor.", "critic."), remedy.replace("actor.", "critic.")
        raise UserError(f"the critic: {error.message}", where=where, remedy=remedy) from None


def _other_model(config: RunConfig, actor: ModelDescription | None) -> ModelDescription:
    section = config.critic
    assert section.path is not None
    if not (section.path / "config.json").is_file():
        raise UserError(f"no config.json in {str(section.path)!r}", where="critic.path", remedy="correct the path")
    shape = resolve_model(config, section.path, classifier=True)
    if actor is not None and shape.vocab_size != actor.vocab_size:
        raise UserError(
            f"a vocabulary of {shape.vocab_size}, the actor's has {actor.vocab_size}",
            where="critic.path",
            remedy="use a model of the same family: actor and critic read the same tokens",
        )
    return shape

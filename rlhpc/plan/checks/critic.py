"""Can the critic be built: does its layout suit the ranks and its model, and is that model one that it can be?"""

from __future__ import annotations

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.critic import CriticSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.checks.parallelism import fitting_layout
from rlhpc.plan.checks.training import check_memory, check_optimizer


def check_critic(config: RunConfig, world_size: int, shape: ModelShape | None) -> None:
    """Refuse what cannot work. ``shape`` is the actor's, where its model is there already."""
    section, name = config.critic, config.algorithm.name
    if ":" not in name and name not in WITH_CRITIC:
        if section != CriticSection():
            raise UserError(f"{name} has no critic", where="critic", remedy="leave the section out, or use ppo")
        return
    if not config.train.steps:
        return
    check_optimizer("critic.optimizer", section.optimizer)
    if section.model is not None:
        shape = _other_model(section, shape)
    try:
        layout = fitting_layout(section.parallel or config.parallel, world_size, shape and shape.with_value_head)
        if shape is not None:
            check_memory(section.memory or config.memory, shape, layout)
    except UserError as error:
        own = error.where.partition(".")[0] if error.where else ""
        given = section.parallel if own == "parallel" else section.memory
        where = f"critic.{error.where}" if own in ("parallel", "memory") and given is not None else error.where
        raise UserError(f"the critic: {error.message}", where=where, remedy=error.remedy) from None


def _other_model(section: CriticSection, actor: ModelShape | None) -> ModelShape:
    assert section.model is not None
    if not (section.model / "config.json").is_file():
        raise UserError(f"no config.json in {str(section.model)!r}", where="critic.model", remedy="correct the path")
    shape = read_model(section.model, classifier=True)
    if actor is not None and shape.vocab_size != actor.vocab_size:
        raise UserError(
            f"a vocabulary of {shape.vocab_size}, the actor's has {actor.vocab_size}",
            where="critic.model",
            remedy="use a model of the same family: actor and critic read the same tokens",
        )
    return shape

"""Which functions score a response, as far as the config alone can tell what is wrong with that."""

from __future__ import annotations

from collections import Counter

from rlhpc.config.reward import RewardSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.plan.files import check_weights, same_vocabulary
from rlhpc.plan.fit import fitting_layout

# reward/mean and its like are of the whole reward, reward/model is a reward model's part.
_TAKEN = ("mean", "std", "max", "min", "model")


def check_reward_model(config: RunConfig, world_size: int) -> None:
    """The reward model's files are whole, it suits its layout, and reads the tokens that the policy writes."""
    section = config.reward.model
    if section is None or not config.train.steps:
        return
    shape = read_model(section.path, classifier=True)
    check_weights(section.path, shape.with_value_head)
    if config.model.path.exists() and not same_vocabulary(section.path, config.model.path):
        raise UserError(
            f"the vocabularies of {str(section.path)!r} and {str(config.model.path)!r} differ",
            where="reward.model.path",
            remedy="use a reward model of the same family: it reads the very tokens that the policy writes",
        )
    try:
        fitting_layout(section.parallel or config.parallel, world_size, shape.with_value_head)
    except UserError as error:
        where = f"reward.model.{error.where}" if section.parallel else error.where
        raise UserError(f"the reward model: {error.message}", where=where, remedy=error.remedy) from None


def check_reward(section: RewardSection) -> None:
    """Refuse a config that names functions in two ways, or two of them alike."""
    if section.functions and (section.function is not None or section.arguments):
        key = "function" if section.function is not None else "arguments"
        raise UserError(f"reward.{key} is given too", where="reward.functions", remedy="give all of it in the list")
    twice = [name for name, count in Counter(item.name for item in section.functions).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]!r} is the name of two", where="reward.functions", remedy="name each differently")
    taken = next((item.name for item in section.functions if item.name in _TAKEN), None)
    if taken is not None:
        raise UserError(f"{taken!r} means something else in the metrics", where="reward.functions", remedy="rename it")

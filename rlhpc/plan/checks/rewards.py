"""Which functions score a response, as far as the config alone can tell what is wrong with that."""

from __future__ import annotations

from collections import Counter

from rlhpc.checkpoint.formats.model_folder import check_tokenizer, check_weights, same_vocabulary
from rlhpc.config.reward import RewardModelSection, RewardSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.checks.parallelism import fitting_layout

# reward/mean and its like are of the whole reward, reward/model is a reward model's part.
MODEL_PART = "model"
_TAKEN = ("mean", "std", "max", "min", MODEL_PART)


def reads_own_words(config: RunConfig) -> bool:
    """The reward model reads conversations through its own tokenizer."""
    section = config.reward.model
    assert section is not None
    if section.own_tokenizer is not None:
        return section.own_tokenizer
    return not same_vocabulary(section.path, config.model.path)


def most_tokens(section: RewardModelSection, shape: ModelShape) -> int:
    """Of a conversation that the reward model reads."""
    return section.max_tokens or shape.usable_positions


def check_reward_model(config: RunConfig, world_size: int) -> None:
    """The reward model's files are whole, it suits its layout, and can read what the policy writes."""
    section = config.reward.model
    if section is None or not (config.train.steps or config.data.validation):
        return
    shape = read_model(section.path, classifier=True)
    check_weights(section.path, shape.with_value_head)
    if config.model.path.exists():
        _check_words(config, section, shape)
    try:
        fitting_layout(section.parallel or config.parallel, world_size, shape.with_value_head)
    except UserError as error:
        where = f"reward.model.{error.where}" if section.parallel else error.where
        raise UserError(f"the reward model: {error.message}", where=where, remedy=error.remedy) from None


def _check_words(config: RunConfig, section: RewardModelSection, shape: ModelShape) -> None:
    limit, most = shape.usable_positions, most_tokens(section, shape)
    if most > limit:
        raise UserError(f"the model has {limit} positions", where="reward.model.max_tokens", remedy="lower it")
    if reads_own_words(config):
        try:
            check_tokenizer(section.path, shape.vocab_size, chat_template=section.chat_template)
        except UserError as error:
            where = "reward.model.chat_template" if error.where == "data.chat_template" else error.where
            remedy = str(error.remedy).replace("set it", f"set {where}")
            raise UserError(f"the reward model: {error.message}", where=where, remedy=remedy) from None
        return
    if not same_vocabulary(section.path, config.model.path):
        raise UserError(
            f"the vocabularies of {str(section.path)!r} and {str(config.model.path)!r} differ",
            where="reward.model.own_tokenizer",
            remedy="set it to true: it cannot read the tokens that the policy writes",
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > most and section.too_long == "error":
        raise UserError(
            f"prompt and response together may have {longest} tokens, the reward model reads {most}",
            where="reward.model.max_tokens",
            remedy="lower data.max_prompt_tokens or rollout.max_response_tokens, or set too_long to truncate",
        )


def check_reward(section: RewardSection) -> None:
    """Refuse a config that names functions in two ways, or two of them alike."""
    if section.functions and (section.function is not None or section.arguments):
        key = "function" if section.function is not None else "arguments"
        raise UserError(f"reward.{key} is given too", where="reward.functions", remedy="give all of it in the list")
    twice = [name for name, count in Counter(item.name for item in section.functions).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]!r}: duplicate name", where="reward.functions", remedy="name each differently")
    taken = next((item.name for item in section.functions if item.name in _TAKEN), None)
    if taken is not None:
        raise UserError(f"{taken!r} means something else in the metrics", where="reward.functions", remedy="rename it")

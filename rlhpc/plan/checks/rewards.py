"""Checks the list of rewards and the reward model's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlhpc.checkpoint.formats.described import resolve_backend, resolve_model
from rlhpc.checkpoint.formats.model_folder import check_tokenizer, check_weights, same_vocabulary
from rlhpc.config.model_settings import reward_model_settings
from rlhpc.config.reward import RewardModelSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.backend import model_layout
from rlhpc.plan.estimates.memory import sequence_tokens

_TAKEN = ("mean", "std", "max", "min")  # reward/mean and its like are of the whole reward


def uses_own_tokenizer(config: RunConfig) -> bool:
    """True if the reward model reads conversations through its own tokenizer."""
    section = config.reward_model
    assert section is not None
    if section.own_tokenizer is not None:
        return section.own_tokenizer
    return not same_vocabulary(section.model, config.model.path)


def most_tokens(config: RunConfig, section: RewardModelSection, shape: ModelDescription) -> int:
    """Returns the maximum tokens of a conversation for the reward model."""
    return section.max_tokens or shape.positions_in(sequence_tokens(config))


def check_reward_model(config: RunConfig, world_size: int) -> None:
    """Refuses a reward model with incomplete files, a layout that does not fit, or a tokenizer that cannot be used."""
    section = config.reward_model
    if section is None or not (config.train.steps or config.data.validation):
        return
    shape = resolve_model(config, section.model, classifier=True)
    check_weights(section.model, shape.with_value_head)
    if config.model.path.exists():
        _check_tokens(config, section, shape)
    if config.reward_model_on == "engines":
        return  # its layout is the engines'
    try:
        parallel = reward_model_settings(config).parallel
        model_layout(resolve_backend(config), parallel, world_size, shape.with_value_head)
    except UserError as error:
        where, remedy = error.where, error.remedy
        if section.parallel is not None or section.on == "judges":
            where, remedy = (text.replace("actor.", f"{config.reward_model_key}.") for text in (where, remedy))
        raise UserError(f"the reward model: {error.message}", where=where, remedy=remedy) from None


def _check_tokens(config: RunConfig, section: RewardModelSection, shape: ModelDescription) -> None:
    limit, most = shape.positions_in(sequence_tokens(config)), most_tokens(config, section, shape)
    key = config.reward_model_key
    if most > limit:
        raise UserError(f"the model has {limit} positions", where=f"{key}.max_tokens", remedy="lower it")
    if uses_own_tokenizer(config):
        try:
            check_tokenizer(section.model, shape.vocab_size, chat_template=section.chat_template)
        except UserError as error:
            where = f"{key}.chat_template" if error.where == "data.chat_template" else error.where
            remedy = error.remedy.replace("set it", f"set {where}")
            raise UserError(f"the reward model: {error.message}", where=where, remedy=remedy) from None
        return
    if not same_vocabulary(section.model, config.model.path):
        raise UserError(
            f"the vocabularies of {str(section.model)!r} and {str(config.model.path)!r} differ",
            where=f"{key}.own_tokenizer",
            remedy="set it to true: it cannot read the tokens that the policy writes",
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > most and section.too_long == "error":
        raise UserError(
            f"prompt and response together may have {longest} tokens, the reward model reads {most}",
            where=f"{key}.max_tokens",
            remedy="lower data.max_prompt_tokens or rollout.max_response_tokens, or set too_long to truncate",
        )


def check_rewards(config: RunConfig) -> None:
    """Refuses several models, and parts of the reward without distinct names."""
    Faults(_reward_faults(config)).raise_all()


def _reward_faults(config: RunConfig) -> Iterator[UserError]:
    functions, rewards = config.reward_functions, config.rewards
    models = [entry for entry in rewards if isinstance(entry, RewardModelSection)]
    if len(models) > 1:
        yield UserError(f"{len(models)} reward models", where="rewards", remedy="leave one")
    unnamed = [key for key, entry in functions.items() if entry.name is None]
    if unnamed and len(functions) > 1:
        yield UserError(f"{len(functions)} functions and no name", where=f"{unnamed[0]}.name", remedy="name each")
    for name, count in Counter(entry.name for entry in rewards if entry.name is not None).items():
        if count > 1:
            yield UserError(f"{name!r}: duplicate name", where="rewards", remedy="name each differently")
        if name in _TAKEN:
            yield UserError(f"{name!r} has another meaning in the metrics", where="rewards", remedy="rename it")

"""Checks tools, dynamic sampling, and further arguments of engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError
from rlhpc.plan.checks.engine_arguments import engine_faults
from rlhpc.plan.checks.sampling import resolved_sections, sampling_faults
from rlhpc.plan.checks.speculative import speculative_faults

# Options of sampling by which a token depends on which earlier ones are of its turn (rlhpc.api).
_OF_TURN = ("presence_penalty", "frequency_penalty", "stop", "bad_words", "structured_output")


def check_rollout(config: RunConfig) -> None:
    """Refuses tools without a chat template, dynamic sampling that could keep no group, arguments that no engine of a
    run takes, and options of sampling and of guesses that contradict others."""
    engine = (*engine_faults(config), *sampling_faults(config), *speculative_faults(config))
    faults = (*_tool_faults(config), *_dynamic_faults(config), *_dealing_faults(config), *engine)
    Faults(faults).raise_all()


def _dealing_faults(config: RunConfig) -> Iterator[UserError]:
    """Turns where responses cannot be interrupted."""
    if config.rollout.dealing != "turns":
        return
    remedy = "set rollout.dealing to longest_first"
    for where, sampling in resolved_sections(config):
        name = next((name for name in _OF_TURN if getattr(sampling, name)), None)
        if name is not None:
            yield UserError(
                f"a response drawn with {where}.{name} begins its turn again when it is interrupted",
                where="rollout.dealing",
                remedy=remedy,
            )
            return


def _dynamic_faults(config: RunConfig) -> Iterator[UserError]:
    dynamic = config.train.dynamic_sampling
    if dynamic is None:
        return
    if dynamic.arguments and dynamic.filter is None:
        yield UserError(
            "there is no filter that takes them",
            where="train.dynamic_sampling.arguments",
            remedy="name one in train.dynamic_sampling.filter",
        )
    if dynamic.filter is not None:
        return
    if config.reward_model is not None and dynamic.metric == config.reward_model.name:
        yield UserError(
            "groups are selected before the reward model has scored them",
            where="train.dynamic_sampling.metric",
            remedy="use reward, the sum of the functions at that point, or the name of one of them",
        )
    if config.rollout.samples_per_prompt == 1:
        yield UserError(
            "a single sample never differs from others: every group would be dropped",
            where="rollout.samples_per_prompt",
            remedy="set it to 2 or more, or name a filter in train.dynamic_sampling.filter",
        )
    if not config.reward_functions:
        yield UserError(
            "groups are selected before the reward model has scored them, and there is no other reward",
            where="train.dynamic_sampling",
            remedy="add a function to rewards, or remove the section",
        )


def _tool_faults(config: RunConfig) -> Iterator[UserError]:
    tools = config.rollout.tools
    if tools and not config.data.chat_template:
        yield UserError(
            "tools are shown to the policy by a chat template",
            where="data.chat_template",
            remedy="set it to true, or to a Jinja file",
        )
    twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    if twice:
        yield UserError(f"{twice[0]!r}: duplicate name", where="rollout.tools", remedy="name each differently")

"""Checks the algorithm's keys against each other."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.algorithm import DEFAULTS, AlgorithmSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError, did_you_mean

# Algorithms without the clipped surrogate, which alone has a dual clip.
_WITHOUT_DUAL_CLIP = ("gspo", "cispo")
# Algorithms that compare a response with no other one to the same prompt.
_WITHOUT_GROUPS = ("reinforce_plus_plus", "remax", "ppo")
_DISCOUNTED = ("reinforce_plus_plus", "ppo")


def check_algorithm(config: RunConfig) -> None:
    """Refuses keys without meaning or effect; of a user's own algorithm, only the common keys are checked."""
    Faults(_faults(config)).raise_all()


def _faults(config: RunConfig) -> Iterator[UserError]:
    section = config.algorithm
    own = ":" in section.name
    if not own and section.name not in DEFAULTS:
        yield UserError(
            f"unknown algorithm {section.name!r}", where="algorithm.name", remedy=did_you_mean(section.name, DEFAULTS)
        )
        own = True  # nothing is known of its keys
    yield from _common(section)
    if own:
        return
    yield from _named(section)
    single = config.rollout.samples_per_prompt < 2
    if single and section.name not in _WITHOUT_GROUPS and config.train.steps and config.train.step is None:
        yield UserError(
            f"{section.name} compares the responses to a prompt, and there is only one: it would learn nothing",
            where="rollout.samples_per_prompt",
            remedy=f"use at least 2, or {', '.join(_WITHOUT_GROUPS[:-1])} or {_WITHOUT_GROUPS[-1]}",
        )


def _common(section: AlgorithmSection) -> Iterator[UserError]:
    if section.aggregation_length is not None and section.aggregation != "constant":
        yield UserError(
            f"{section.aggregation} is not divided by a constant",
            where="algorithm.aggregation_length",
            remedy="leave it out, or set algorithm.aggregation to constant",
        )
    if section.kl.target is not None and not section.kl.coefficient:
        yield UserError(
            "a coefficient of 0 does not adapt",
            where="algorithm.kl.target",
            remedy="leave it out, or set algorithm.kl.coefficient above 0",
        )
    bounds = section.rollout_correction
    if bounds.method == "mask" and bounds.low >= bounds.high:
        yield UserError(
            f"no weight is between {bounds.low:g} and {bounds.high:g}",
            where="algorithm.rollout_correction.low",
            remedy="set it below algorithm.rollout_correction.high",
        )


def _named(section: AlgorithmSection) -> Iterator[UserError]:
    if section.dual_clip is not None and section.name in _WITHOUT_DUAL_CLIP:
        yield UserError(
            f"the loss of {section.name} has no dual clip", where="algorithm.dual_clip", remedy="leave it out"
        )
    if section.gamma != 1 and section.name not in _DISCOUNTED:
        yield UserError(
            f"{section.name} does not discount: all tokens of a response share its reward",
            where="algorithm.gamma",
            remedy="leave it out, or use reinforce_plus_plus or ppo",
        )
    if section.gae_lambda != 1 and section.name != "ppo":
        yield UserError(
            f"{section.name} has no critic to bootstrap from",
            where="algorithm.gae_lambda",
            remedy="leave it out, or use ppo",
        )
    if section.name == "dr_grpo" and section.normalise_std:
        yield UserError(
            "dr_grpo is GRPO without the division by the deviation",
            where="algorithm.normalise_std",
            remedy="leave it out, or use grpo",
        )

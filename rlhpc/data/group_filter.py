"""Selects groups with a non-zero advantage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rlhpc.api import Sample
from rlhpc.config.rollout import DynamicSamplingSection
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.imports import import_attribute

Filter = Callable[[Sequence[Sample]], bool]

_WHERE = "train.dynamic_sampling.filter"


def make_filter(section: DynamicSamplingSection) -> Filter:
    """Filter that accepts a group if its samples' metric differs, or by the user's function."""
    if section.filter is not None:
        return functools.partial(_ask, import_attribute(section.filter, _WHERE), section)
    return lambda samples: len({_score(sample, section.metric) for sample in samples}) > 1


def _ask(own: Callable[..., object], section: DynamicSamplingSection, samples: Sequence[Sample]) -> bool:
    """Calls the user's filter."""
    try:
        return bool(own(samples, **section.arguments))
    except Exception as error:  # the user's code may raise anything
        what = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{section.filter} raised {what}", where=_WHERE, remedy="fix it, or its arguments") from error


def _score(sample: Sample, metric: str) -> float:
    if metric == "reward":
        return sample.reward
    try:
        return sample.reward_parts[metric]
    except KeyError:
        if _has_failed(sample, metric.rpartition("/")[0]):
            return 0.0
        raise UserError(
            f"the reward has no part {metric!r}",
            where="train.dynamic_sampling.metric",
            remedy=f"use reward, or one of {', '.join(sample.reward_parts) or '(none)'}",
        ) from None


def _has_failed(sample: Sample, function: str) -> bool:
    """Whether the reward function of that name ("" for a single one) may have failed: its reward is 0 and it returned
    no further parts."""
    if not function:
        return not sample.reward_parts and not sample.reward
    has_more = any(name.startswith(f"{function}/") for name in sample.reward_parts)
    return sample.reward_parts.get(function) == 0 and not has_more

"""Which groups teach something."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhpc.api import Sample
from rlhpc.config.rollout import DynamicSamplingSection
from rlhpc.core.errors import UserError
from rlhpc.core.imports import import_attribute

Filter = Callable[[Sequence[Sample]], bool]


def make_filter(section: DynamicSamplingSection) -> Filter:
    """Whether a group's samples teach something."""
    if section.filter is not None:
        own = import_attribute(section.filter, "train.dynamic_sampling.filter")
        return lambda samples: bool(own(samples, **section.arguments))
    return lambda samples: len({_score(sample, section.metric) for sample in samples}) > 1


def _score(sample: Sample, metric: str) -> float:
    if metric == "reward":
        return sample.reward
    try:
        return sample.reward_parts[metric]
    except KeyError:
        raise UserError(
            f"the reward has no part {metric!r}",
            where="train.dynamic_sampling.metric",
            remedy=f"use reward, or one of {', '.join(sample.reward_parts) or '(none)'}",
        ) from None

"""Warnings of training on samples of another policy than the one trained."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.plan.checks.placement import separates
from rlhpc.plan.checks.sampling import sampling_warnings


def off_policy_warnings(config: RunConfig) -> Iterator[str]:
    """Yields one warning for each key that makes the sampled policy another than the trained one."""
    if not config.train.steps:
        return
    yield from sampling_warnings(config)
    if config.algorithm.rollout_correction.method != "none":
        return
    dynamic = config.train.dynamic_sampling
    older = {
        "train.replay": config.train.replay is not None,
        "train.dynamic_sampling.oversample": dynamic is not None and dynamic.oversample > 1,
        "asynchrony.max_staleness": separates(config) and config.asynchrony.max_staleness > 0,
    }
    for key in (key for key, used in older.items() if used):
        yield (
            f"{key}: trains on tokens of older policies as if the present one had sampled them; set "
            "algorithm.rollout_correction.method to truncate"
        )

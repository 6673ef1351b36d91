"""Ages of a step's tokens, in policy versions, and the log-prob difference of each age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlhpc.api import Sample
from rlhpc.trainer.roles import PerSample

AGE = "age"  # per-token value of a batch: versions since the token was sampled
_MOST_AGES = 32  # with metrics of their own; older tokens count as of the last one


def token_ages(samples: Sequence[Sample], policy_version: int) -> PerSample:
    """Policy versions since each response token was sampled."""
    return [(policy_version - _versions(sample)).astype(np.float32) for sample in samples]


def ages_of(ages: PerSample) -> tuple[int, ...]:
    """The different ages; the last one stands for older ones too."""
    found = sorted({int(age) for each in ages for age in np.unique(each)})
    return tuple(found[:_MOST_AGES])


def age_sums(
    ages: Sequence[int], age: torch.Tensor, weights: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Sums of ``values`` over the tokens of each age, by ``weights``."""
    found = {}
    for place, number in enumerate(ages):
        here = (age >= number if place + 1 == len(ages) else age == number) * weights
        found[f"{AGE}/{number}/weight"] = here.sum()
        found |= {f"{AGE}/{number}/{name}": (value * here).sum() for name, value in values.items()}
    return found


def age_metrics(updates: Sequence[Mapping[str, float]], ages: Sequence[int]) -> dict[str, float]:
    """``staleness/N/…`` from the loss sums of a step's updates."""
    totals: dict[str, float] = {}
    for sums in updates:
        for name, value in sums.items():
            if name.startswith(f"{AGE}/"):
                totals[name] = totals.get(name, 0.0) + value
    weight = sum(totals.get(f"{AGE}/{number}/weight", 0.0) for number in ages)
    found = {}
    for number in ages:
        own = totals.get(f"{AGE}/{number}/weight", 0.0)
        if own:
            found[f"staleness/{number}/token_fraction"] = own / weight
            for name in ("mismatch_kl", "logprob_diff_mean"):
                found[f"staleness/{number}/{name}"] = totals[f"{AGE}/{number}/{name}"] / own
    return found


def _versions(sample: Sample) -> np.ndarray:
    if sample.token_versions is not None:
        return sample.token_versions
    return np.full(sample.response_len, sample.policy_version, np.int32)

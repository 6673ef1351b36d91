"""Importance weights that correct for the difference between engine and trainer."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.config.algorithm import RolloutCorrectionSection

_LARGEST_LOG_RATIO = 20.0


class Correction(NamedTuple):
    weights: Float[Tensor, " T"]  # without gradient, 0 where not trained on
    outside: Float[Tensor, " T"]  # 1 where the bounds changed the weight


def importance_weights(
    log_probs: Float[Tensor, " T"],
    engine_log_probs: Float[Tensor, " T"],
    mask: Float[Tensor, " T"],
    sequence: Int64[Tensor, " T"],
    section: RolloutCorrectionSection,
) -> Correction:
    """Trainer's over engine's probability of each token, or of its whole response, within the section's bounds.

    truncate: truncated importance sampling (Yao et al. 2025); mask: IcePop (Ling team 2025).
    """
    log_ratio = (log_probs - engine_log_probs).detach()
    if section.level == "sequence":
        log_ratio = sequence_sums(log_ratio * mask, sequence)
    ratio = log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    above = ratio > section.high
    if section.method == "truncate":
        return Correction(ratio.clamp(max=section.high) * mask, above * mask)
    outside = above | (ratio < section.low)
    return Correction(ratio.masked_fill(outside, 0.0) * mask, outside * mask)


def sequence_sums(values: Float[Tensor, " T"], sequence: Int64[Tensor, " T"]) -> Float[Tensor, " T"]:
    """At every token the sum over its sequence."""
    return values.new_zeros(len(values)).index_add_(0, sequence, values)[sequence]

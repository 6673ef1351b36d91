"""Losses of tokens [T], importance weights against the engine, and shares of tokens in the sum.

Policy losses are per token; ``objective`` sums them. The caller divides the sums. Means do not depend on packing or the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.config.algorithm import AlgorithmSection, RolloutCorrectionSection

_LARGEST_LOG_RATIO = 20.0  # bounds the exponential, as verl and TRL do
_LARGEST_SEQUENCE_LOG_RATIO = 10.0


class Clip(NamedTuple):
    """Bounds of a probability ratio: 1 - low, 1 + high."""

    low: float
    high: float

    @classmethod
    def of(cls, section: AlgorithmSection) -> Clip:
        return cls(section.clip_low, section.clip_high)

    def bound(self, ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        return ratio.clamp(1 - self.low, 1 + self.high)


class PolicyTerms(NamedTuple):
    """Per token."""

    loss: Float[Tensor, " T"]
    clipped: Float[Tensor, " T"]  # 1 where the clip removed (CISPO: bounded) the gradient
    dual_clipped: Float[Tensor, " T"] | None = None  # 1 where the dual clip did


class ClippedSums(NamedTuple):
    loss: Float[Tensor, ""]
    clipped: Float[Tensor, ""]  # weighted count of tokens whose gradient the clip removed


def clipped_surrogate(
    log_probs: Float[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    clip: Clip,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """PPO's loss (Schulman et al. 2017) with separate bounds (DAPO, Yu et al. 2025) and dual clip (Ye et al. 2020,
    eq. 5)."""
    ratio = (log_probs - old_log_probs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    terms = _pessimistic(ratio, advantages, clip)
    if dual_clip is None:
        return terms
    most = -advantages * dual_clip
    beyond = (advantages < 0) & (terms.loss > most)
    return PolicyTerms(torch.where(beyond, most, terms.loss), terms.clipped, beyond.to(ratio.dtype))


def sequence_surrogate(
    log_probs: Float[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    mask: Float[Tensor, " T"],
    sequence: Int64[Tensor, " T"],
    clip: Clip,
) -> PolicyTerms:
    """GSPO's loss (Zheng et al. 2025, eq. 14): every token has its response's ratio, the geometric mean of its tokens',
    and the gradient of its own log-prob. With one advantage a response this is the gradient of the ratio itself."""
    length = sequence_sums(mask, sequence).clamp(min=1)
    mean = sequence_sums((log_probs - old_log_probs).detach() * mask, sequence) / length
    ratio = (log_probs - log_probs.detach() + mean).clamp(max=_LARGEST_SEQUENCE_LOG_RATIO).exp()
    return _pessimistic(ratio, advantages, clip)


def weighted_log_likelihood(
    log_probs: Float[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    clip: Clip,
) -> PolicyTerms:
    """CISPO's loss (MiniMax 2025, eq. 4): policy gradient times a bounded ratio, so every token has a gradient."""
    ratio = (log_probs - old_log_probs).detach().clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    bounded = clip.bound(ratio)
    return PolicyTerms(-bounded * advantages * log_probs, (ratio != bounded).to(ratio.dtype))


def policy_gradient(log_probs: Float[Tensor, " T"], advantages: Float[Tensor, " T"]) -> PolicyTerms:
    """REINFORCE's loss (Williams 1992): exact for the policy that sampled the tokens, so for a step's first update."""
    return PolicyTerms(-advantages * log_probs, torch.zeros_like(log_probs))


def value_loss(
    values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    weight: Float[Tensor, " T"],
    clip: float | None,
) -> ClippedSums:
    """A critic's loss: half its squared error, the larger of that with and without the clip around the old values."""
    error = (values - returns).square()
    if clip is None:
        return ClippedSums(0.5 * (error * weight).sum(), torch.zeros_like(weight).sum())
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    clipped = ((bounded > error).to(weight.dtype) * weight).sum()
    return ClippedSums(0.5 * (torch.maximum(error, bounded) * weight).sum(), clipped.detach())


def negative_log_likelihood(log_probs: Float[Tensor, " T"], weight: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Supervised loss."""
    return -(log_probs * weight).sum()


def _pessimistic(ratio: Float[Tensor, " T"], advantages: Float[Tensor, " T"], clip: Clip) -> PolicyTerms:
    """The larger loss of the free and the clipped ratio."""
    free = -advantages * ratio
    bounded = -advantages * clip.bound(ratio)
    return PolicyTerms(torch.maximum(free, bounded), (bounded > free).to(ratio.dtype))


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


@dataclass(frozen=True)
class Shares:
    """Weight of a token of each response in the loss sum, and the denominator of the sum over all ranks."""

    weights: tuple[float, ...]
    denominator: float


def shares(lengths: Sequence[int], aggregation: str, constant: int) -> Shares:
    """Shares of a minibatch of responses with ``lengths`` trained tokens. A response with none has no share.

    token-mean: over tokens (DAPO); sequence-mean: over responses of their token means (GRPO, GSPO as published);
    constant: over responses of their token sums over ``constant`` (Dr. GRPO).
    """
    responses = sum(length > 0 for length in lengths) or 1  # without any, sums are 0 and so is the mean
    match aggregation:
        case "token-mean":
            return Shares((1.0,) * len(lengths), float(sum(lengths) or 1))
        case "sequence-mean":
            return Shares(tuple(1.0 / max(length, 1) for length in lengths), float(responses))
        case "constant":
            return Shares((1.0,) * len(lengths), float(responses * constant))
    raise AssertionError(f"unknown aggregation {aggregation}")

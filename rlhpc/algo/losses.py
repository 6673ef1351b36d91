"""Losses of tokens [T]. Policy losses are per token; ``objective`` sums them up. A sum is divided by the caller."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.algo.rollout_correction import sequence_sums

_LARGEST_LOG_RATIO = 20.0  # bounds the exponential, as the field does
_LARGEST_SEQUENCE_LOG_RATIO = 10.0


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
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """PPO's (Schulman et al. 2017) with separate bounds (DAPO, Yu et al. 2025), dual clip (Ye et al. 2020, eq. 5)."""
    ratio = (log_probs - old_log_probs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    terms = _pessimistic(ratio, advantages, clip_low, clip_high)
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
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """GSPO's (Zheng et al. 2025, eq. 14): every token has its response's ratio, the geometric mean over its tokens,
    and the gradient of its own log-prob. With one advantage a response this is the gradient of the ratio itself."""
    length = sequence_sums(mask, sequence).clamp(min=1)
    mean = sequence_sums((log_probs - old_log_probs).detach() * mask, sequence) / length
    ratio = (log_probs - log_probs.detach() + mean).clamp(max=_LARGEST_SEQUENCE_LOG_RATIO).exp()
    return _pessimistic(ratio, advantages, clip_low, clip_high)


def weighted_log_likelihood(
    log_probs: Float[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """CISPO's (MiniMax 2025, eq. 4): the policy gradient times a bounded ratio, so that every token has a gradient."""
    ratio = (log_probs - old_log_probs).detach().clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyTerms(-bounded * advantages * log_probs, (ratio != bounded).to(ratio.dtype))


def policy_gradient(log_probs: Float[Tensor, " T"], advantages: Float[Tensor, " T"]) -> PolicyTerms:
    """REINFORCE's (Williams 1992): right for the policy that drew the tokens, so for a step's first update."""
    return PolicyTerms(-advantages * log_probs, torch.zeros_like(log_probs))


def value_loss(
    values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    weight: Float[Tensor, " T"],
    clip: float | None,
) -> ClippedSums:
    """A critic's: half the square of its error, of the worse of ``values`` and of those within ``clip`` of the old."""
    error = (values - returns).square()
    if clip is None:
        return ClippedSums(0.5 * (error * weight).sum(), torch.zeros_like(weight).sum())
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    clipped = ((bounded > error).to(weight.dtype) * weight).sum()
    return ClippedSums(0.5 * (torch.maximum(error, bounded) * weight).sum(), clipped.detach())


def negative_log_likelihood(log_probs: Float[Tensor, " T"], weight: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Supervised loss."""
    return -(log_probs * weight).sum()


def _pessimistic(
    ratio: Float[Tensor, " T"], advantages: Float[Tensor, " T"], clip_low: float, clip_high: float
) -> PolicyTerms:
    """The worse of free and clipped ratio."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyTerms(torch.maximum(free, bounded), (bounded > free).to(ratio.dtype))

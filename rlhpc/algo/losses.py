"""Losses of tokens [T]. Policy losses are per token; ``objective`` sums them. The caller divides the sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.algo.rollout_correction import sequence_sums
from rlhpc.config.algorithm import AlgorithmSection

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

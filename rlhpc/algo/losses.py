"""Losses on per-token tensors [T]: weighted sums, which the caller divides by a denominator over the whole batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class ClippedSums(NamedTuple):
    loss: Float[Tensor, ""]
    clipped: Float[Tensor, ""]  # weighted count of tokens whose gradient the clip removed


def clipped_policy_loss(
    log_probs: Float[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    weight: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
) -> ClippedSums:
    """PPO's clipped surrogate (Schulman et al. 2017), with separate bounds (DAPO, Yu et al. 2025)."""
    ratio = (log_probs - old_log_probs).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = (torch.maximum(free, bounded) * weight).sum()
    return ClippedSums(loss, ((bounded > free).float() * weight).sum().detach())


def kl_divergence(
    log_probs: Float[Tensor, " T"], reference_log_probs: Float[Tensor, " T"], estimator: str
) -> Float[Tensor, " T"]:
    """Per-token estimate of KL(policy, reference) (Schulman 2020): k1 unbiased, k2 low variance, k3 both."""
    difference = log_probs - reference_log_probs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            # The reverse log-ratio bounded as the field does, lest one token's exponential drown the batch.
            reverse = (-difference).clamp(-20, 20)
            return (reverse.exp() - reverse - 1).clamp(-10, 10)
    raise AssertionError(f"unknown estimator {estimator}")


def negative_log_likelihood(log_probs: Float[Tensor, " T"], weight: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """Supervised loss."""
    return -(log_probs * weight).sum()

"""Advantages from rewards: of groups of responses [B], and of tokens [N] (see ``Responses``)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.algo.ragged import accumulate_backwards, shift_back
from rlhpc.algo.responses import Estimate

_WHITEN_EPSILON = 1e-8  # added to the variance


def group_relative(
    rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"], epsilon: float, *, normalise_std: bool
) -> Float[Tensor, " B"]:
    """Reward less the mean of its group, divided by the group's standard deviation + epsilon if ``normalise_std``.

    GRPO (Shao et al. 2024, section 4.1.2); without the division Dr. GRPO (Liu et al. 2025). A group of one keeps its
    reward, as in verl (mean 0, deviation 1).
    """
    mean, count, inverse = _group_means(rewards, groups)
    centred = rewards - torch.where(count > 1, mean, 0.0)[inverse]
    if not normalise_std:
        return centred
    variance = torch.zeros_like(mean).index_add_(0, inverse, centred.square()) / (count - 1).clamp(min=1)
    deviation = torch.where(count > 1, variance.sqrt(), 1.0)
    return centred / (deviation[inverse] + epsilon)


def leave_one_out(rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Reward less the mean of the others of its group: RLOO (Ahmadian et al. 2024). A group of one keeps its reward."""
    mean, count, inverse = _group_means(rewards, groups)
    scale = torch.where(count > 1, count / (count - 1).clamp(min=1), 1.0)
    return scale[inverse] * (rewards - torch.where(count > 1, mean, 0.0)[inverse])


def discounted_returns(
    token_rewards: Float[Tensor, " N"], mask: Float[Tensor, " N"], lengths: Int64[Tensor, " B"], gamma: float
) -> Float[Tensor, " N"]:
    """Sum of each token's and all later rewards, discounted by ``gamma`` per token; tokens with mask 0 do not count."""
    decay = torch.where(mask > 0, gamma, 1.0).to(token_rewards.dtype)
    return accumulate_backwards(token_rewards * mask, decay, lengths) * mask


def generalised(
    token_rewards: Float[Tensor, " N"],
    values: Float[Tensor, " N"],
    mask: Float[Tensor, " N"],
    lengths: Int64[Tensor, " B"],
    gamma: float,
    decay: float,
) -> Estimate:
    """GAE (Schulman et al. 2016) with lambda ``decay``, not whitened, and the returns that are the critic's targets.

    The next state of a token is the next token that the policy sampled: tokens with mask 0 in between are skipped.
    """
    own = mask > 0
    following = shift_back(accumulate_backwards(values * mask, (~own).to(values.dtype), lengths), lengths)
    errors = (token_rewards + gamma * following - values) * mask
    factors = torch.where(own, gamma * decay, 1.0).to(values.dtype)
    advantages = accumulate_backwards(errors, factors, lengths) * mask
    return Estimate(advantages, (advantages + values) * mask)


def whiten(values: Float[Tensor, " N"], mask: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Scales values to mean 0 and deviation 1 over the masked tokens, 0 elsewhere. A single token keeps its value."""
    count = mask.sum()
    if count < 2:
        return values * mask
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + _WHITEN_EPSILON) * mask


def _group_means(
    rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"]
) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"], Int64[Tensor, " B"]]:
    """Mean and count of each group, and which group each reward belongs to."""
    index, inverse = torch.unique(groups, return_inverse=True)
    count = rewards.new_zeros(len(index)).index_add_(0, inverse, torch.ones_like(rewards))
    return rewards.new_zeros(len(index)).index_add_(0, inverse, rewards) / count, count, inverse

"""Advantages from rewards: of groups of responses [B], and of tokens [N] (see ``Responses``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.algo.algorithm import Estimate, accumulate_backwards, shift_back

_WHITEN_EPSILON = 1e-8  # added to the variance


def group_relative(
    rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"], epsilon: float, *, normalise_std: bool
) -> Float[Tensor, " B"]:
    """Reward less the mean of its group, divided by the group's standard deviation + epsilon if ``normalise_std``.

    GRPO (Shao et al. 2024, section 4.1.2); without the division Dr. GRPO (Liu et al. 2025). 0 in a group of one, such
    as one whose other responses are dropped: there is nothing to compare with. verl keeps its reward.
    """
    group = _of_groups(rewards, groups)
    centred = (rewards - group.mean[group.index]) * group.differ[group.index]
    if not normalise_std:
        return centred
    variance = torch.zeros_like(group.mean).index_add_(0, group.index, centred.square()) / (group.count - 1).clamp(
        min=1
    )
    return centred / (variance.sqrt()[group.index] + epsilon)


def leave_one_out(rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Reward less the mean of the others of its group: RLOO (Ahmadian et al. 2024). 0 in a group of one."""
    group = _of_groups(rewards, groups)
    scale = group.count / (group.count - 1).clamp(min=1) * group.differ
    return scale[group.index] * (rewards - group.mean[group.index])


def discounted_returns(
    token_rewards: Float[Tensor, " N"], mask: Float[Tensor, " N"], lengths: Int64[Tensor, " B"], gamma: float
) -> Float[Tensor, " N"]:
    """Sum of each token's and all later rewards, discounted by ``gamma`` per token; tokens with mask 0 do not count."""
    decay = torch.ones_like(token_rewards).masked_fill(mask > 0, gamma)
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
    factors = torch.ones_like(values).masked_fill(own, gamma * decay)
    advantages = accumulate_backwards(errors, factors, lengths) * mask
    return Estimate(advantages, (advantages + values) * mask)


def whiten(values: Float[Tensor, " N"], mask: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Scales values to mean 0 and deviation 1 over the masked tokens, 0 elsewhere and if they are all equal. A single
    token keeps its value."""
    count = mask.sum()
    if count < 2:
        return values * mask
    own = values[mask > 0]
    if own.min() == own.max():
        return torch.zeros_like(values)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + _WHITEN_EPSILON) * mask


class _Groups(NamedTuple):
    """Statistics of each of G groups; ``index`` is the group of each reward."""

    mean: Float[Tensor, " G"]
    count: Float[Tensor, " G"]
    differ: Float[Tensor, " G"]  # 0 if its rewards are all equal: the mean of equal numbers may be rounded to another
    index: Int64[Tensor, " B"]


def _of_groups(rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"]) -> _Groups:
    known, index = torch.unique(groups, return_inverse=True)
    zeros = rewards.new_zeros(len(known))
    count = zeros.index_add(0, index, torch.ones_like(rewards))
    mean = zeros.index_add(0, index, rewards) / count
    least, most = (zeros.scatter_reduce(0, index, rewards, kind, include_self=False) for kind in ("amin", "amax"))
    return _Groups(mean, count, (least < most).to(rewards.dtype), index)

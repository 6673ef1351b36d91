"""Advantages from rewards."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def group_relative(
    rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"], normalise_std: bool, epsilon: float
) -> Float[Tensor, " B"]:
    """Reward less the mean of its group, over the group's standard deviation + epsilon if asked.

    GRPO (Shao et al. 2024, section 4.1.2); without the division Dr. GRPO (Liu et al. 2025). A group of one keeps its
    reward as it is, as the field does (mean 0, deviation 1).
    """
    index, inverse = torch.unique(groups, return_inverse=True)
    count = torch.zeros(len(index), dtype=rewards.dtype).index_add_(0, inverse, torch.ones_like(rewards))
    mean = torch.zeros_like(count).index_add_(0, inverse, rewards) / count
    mean = torch.where(count > 1, mean, 0.0)
    centred = rewards - mean[inverse]
    if not normalise_std:
        return centred
    variance = torch.zeros_like(count).index_add_(0, inverse, centred.square()) / (count - 1).clamp(min=1)
    deviation = torch.where(count > 1, variance.sqrt(), 1.0)
    return centred / (deviation[inverse] + epsilon)

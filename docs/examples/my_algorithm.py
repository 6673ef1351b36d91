"""An algorithm of one's own: REINFORCE with the mean of a prompt's other samples as baseline (RLOO, Ahmadian et al.
2024)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhpc.algo import Algorithm, Estimate, Responses
from rlhpc.config.algorithm import AlgorithmSection


def advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    """Reward of each response less the mean reward of the others to its prompt; 0 if there are no others."""
    rewards = responses.rewards
    _, group, count = torch.unique(responses.groups, return_inverse=True, return_counts=True)
    total = torch.zeros(len(count), dtype=rewards.dtype).index_add_(0, group, rewards)
    others = count[group] - 1
    return Estimate(responses.spread((rewards - (total[group] - rewards) / others.clamp(min=1)) * (others > 0)))


def loss(tokens: Mapping[str, Tensor], section: AlgorithmSection) -> dict[str, Tensor]:
    """Sums over the tokens [T] of a batch: "loss" is differentiated, the others are reported."""
    weight = tokens["weight"]
    policy = -(tokens["advantages"] * tokens["log_probs"] * weight).sum()
    return {"loss": policy, "policy_loss": policy, "entropy": (tokens["entropy"] * weight).sum()}


RLOO = Algorithm("rloo", advantage, loss)

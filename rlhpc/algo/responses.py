"""Input and output of advantage functions: a whole step's responses, and an estimate for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.algo.ragged import owners, row_sums


@dataclass(frozen=True)
class Responses:
    """B responses of a step, their N tokens end to end, in float64; equal on every rank."""

    token_rewards: Float[Tensor, " N"]  # the reward at a response's last sampled token, less each token's KL penalty
    mask: Float[Tensor, " N"]  # 1 where the policy sampled the token, 0 where it was given, such as a tool's answer
    lengths: Int64[Tensor, " B"]
    groups: Int64[Tensor, " B"]  # responses of one group answer the same prompt
    baselines: Float[Tensor, " B"] | None = None  # rewards of greedy responses, with Algorithm.needs_greedy
    values: Float[Tensor, " N"] | None = None  # the critic's, with Algorithm.needs_critic

    @classmethod
    def of(
        cls,
        rewards: Float[Tensor, " B"],
        groups: Int64[Tensor, " B"],
        lengths: Int64[Tensor, " B"],
        *,
        mask: Float[Tensor, " N"] | None = None,
        penalty: Float[Tensor, " N"] | None = None,
    ) -> Responses:
        """From one reward for each response; ``penalty``, such as a KL term, is subtracted from each token's reward.

        A response whose mask is 0 everywhere is not trained on, but its reward counts in its group's baseline.
        """
        rows = owners(lengths)
        if mask is None:
            mask = rewards.new_ones(len(rows))
        token_rewards = rewards.new_zeros(len(rows)) if penalty is None else -penalty * mask
        places = torch.where(mask > 0, torch.arange(len(rows)), -1)
        last = torch.full_like(lengths, -1).scatter_reduce_(0, rows, places, "amax")
        last = torch.where(last < 0, lengths.cumsum(0) - 1, last)
        token_rewards[last[lengths > 0]] += rewards[lengths > 0]
        return cls(token_rewards, mask, lengths, groups)

    @property
    def rewards(self) -> Float[Tensor, " B"]:
        """Total reward of each response."""
        return row_sums(self.token_rewards, owners(self.lengths), len(self.lengths))

    def spread(self, values: Float[Tensor, " B"]) -> Float[Tensor, " N"]:
        """Repeats a response's value at each of its sampled tokens; 0 at the others."""
        return torch.repeat_interleave(values, self.lengths) * self.mask


class Estimate(NamedTuple):
    """Per token: its advantage and, with a critic, the critic's target."""

    advantages: Float[Tensor, " N"]
    returns: Float[Tensor, " N"] | None = None

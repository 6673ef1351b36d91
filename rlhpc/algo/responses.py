"""What advantages are made of: a whole step's responses, and what comes out."""

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

    token_rewards: Float[Tensor, " N"]  # a response's reward at its last own token, less each token's KL penalty
    mask: Float[Tensor, " N"]  # 1 where the policy chose the token, 0 where it was given to it
    lengths: Int64[Tensor, " B"]
    groups: Int64[Tensor, " B"]  # responses of one group answer the same prompt
    baselines: Float[Tensor, " B"] | None = None  # reward of the likeliest response, where the algorithm asks for it
    values: Float[Tensor, " N"] | None = None  # a critic's, where there is one

    @classmethod
    def of(
        cls,
        rewards: Float[Tensor, " B"],
        groups: Int64[Tensor, " B"],
        lengths: Int64[Tensor, " B"],
        *,
        mask: Float[Tensor, " N"] | None = None,
        penalty: Float[Tensor, " N"] | None = None,
        baselines: Float[Tensor, " B"] | None = None,
        values: Float[Tensor, " N"] | None = None,
    ) -> Responses:
        """From one reward for each response; ``penalty`` is taken from each token's, such as a KL term.

        A response of given tokens alone teaches nothing, but keeps its reward: its group is compared with it.
        """
        rows = owners(lengths)
        if mask is None:
            mask = rewards.new_ones(len(rows))
        token_rewards = rewards.new_zeros(len(rows)) if penalty is None else -penalty * mask
        places = torch.where(mask > 0, torch.arange(len(rows)), -1)
        last = torch.full_like(lengths, -1).scatter_reduce_(0, rows, places, "amax")
        last = torch.where(last < 0, lengths.cumsum(0) - 1, last)
        token_rewards[last[lengths > 0]] += rewards[lengths > 0]
        return cls(token_rewards, mask, lengths, groups, baselines, values)

    @property
    def rewards(self) -> Float[Tensor, " B"]:
        """Of each response in all."""
        return row_sums(self.token_rewards, owners(self.lengths), len(self.lengths))

    def spread(self, values: Float[Tensor, " B"]) -> Float[Tensor, " N"]:
        """A value of each response at all its tokens that the policy chose, 0 at the others."""
        return torch.repeat_interleave(values, self.lengths) * self.mask


class Estimate(NamedTuple):
    """Per token: how much better than expected it was, and, where there is a critic, what that should have said."""

    advantages: Float[Tensor, " N"]
    returns: Float[Tensor, " N"] | None = None

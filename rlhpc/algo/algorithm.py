"""An algorithm: a function from a step's rewards to advantages of tokens, and a loss.

Rows of ``lengths`` tokens are laid end to end, N in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.config.algorithm import AlgorithmSection


def owners(lengths: Int64[Tensor, " B"]) -> Int64[Tensor, " N"]:
    """The row of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def row_sums(values: Float[Tensor, " N"], rows: Int64[Tensor, " N"], count: int) -> Float[Tensor, " B"]:
    """Sum of each of ``count`` rows; ``rows`` are the tokens' owners."""
    return values.new_zeros(count).index_add_(0, rows, values)


def accumulate_backwards(
    values: Float[Tensor, " N"], decay: Float[Tensor, " N"], lengths: Int64[Tensor, " B"]
) -> Float[Tensor, " N"]:
    """y[t] = values[t] + decay[t] y[t + 1] within each row, in log2(longest row) passes over all of them."""
    result, decay = values.clone(), decay.clone()
    decay[lengths.cumsum(0)[lengths > 0] - 1] = 0.0  # rows do not mix
    longest = int(lengths.max()) if len(lengths) else 0
    step = 1
    while step < longest:
        result[:-step] = result[:-step] + decay[:-step] * result[step:]
        decay[:-step] = decay[:-step] * decay[step:]
        decay[-step:] = 0.0
        step *= 2
    return result


def shift_back(values: Float[Tensor, " N"], lengths: Int64[Tensor, " B"]) -> Float[Tensor, " N"]:
    """Each token's successor's value, 0 for the last one of a row."""
    shifted = torch.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[lengths.cumsum(0)[lengths > 0] - 1] = 0.0
    return shifted


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
        """Responses from one reward each; ``penalty``, such as a KL term, is subtracted from each token's reward.

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


# (a whole step's responses, section) -> advantages of their tokens [N]; called with the same arguments on every rank
AdvantageFunction = Callable[[Responses, AlgorithmSection], Estimate]
# (token tensors [T] by name, section) -> sums by name; "loss" is differentiated, the others are metrics.
# Names: log_probs and entropy (with gradient), old_log_probs, engine_log_probs, advantages, weight, sequence (which
# of the batch's sequences a token belongs to), and reference_log_probs where there is a reference model.
PolicyLoss = Callable[[Mapping[str, Tensor], AlgorithmSection], dict[str, Float[Tensor, ""]]]


@dataclass(frozen=True)
class Algorithm:
    name: str
    advantage: AdvantageFunction
    loss: PolicyLoss
    needs_greedy: bool = False  # the greedy response to each prompt is generated and scored too: Responses.baselines
    needs_critic: bool = False  # a critic gives each token's value, and is trained on the estimate's returns

    def needs_reference(self, section: AlgorithmSection) -> bool:
        """True if log-probs under the reference model enter the loss or the reward."""
        return section.kl.coefficient > 0

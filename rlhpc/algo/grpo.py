"""GRPO: group-relative advantages, clipped surrogate, KL to a reference in the loss (Shao et al. 2024).

Two variants differ in configuration alone: Dr. GRPO (Liu et al. 2025) divides neither by the deviation nor by the
responses' lengths; DAPO (Yu et al. 2025) has a larger clip range above 1 than below.
"""

from __future__ import annotations

from dataclasses import replace

from rlhpc.algo.advantages import group_relative
from rlhpc.algo.algorithm import Algorithm, Estimate, Responses
from rlhpc.algo.objective import clipped_loss
from rlhpc.config.algorithm import AlgorithmSection


def group_advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    """Gives every token its response's advantage over the others of the group."""
    advantages = group_relative(
        responses.rewards, responses.groups, section.std_epsilon, normalise_std=section.normalise_std
    )
    return Estimate(responses.spread(advantages))


GRPO = Algorithm("grpo", group_advantage, clipped_loss)
DR_GRPO = replace(GRPO, name="dr_grpo")
DAPO = replace(GRPO, name="dapo")

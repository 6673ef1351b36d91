"""GRPO: group-relative advantages, clipped surrogate, KL to a reference in the loss (Shao et al. 2024).

Two of its kin differ in the configuration alone: Dr. GRPO (Liu et al. 2025) neither divides by the deviation nor by the
responses' lengths, DAPO (Yu et al. 2025) clips higher above than below.
"""

from __future__ import annotations

from dataclasses import replace

from rlhpc.algo.advantages import group_relative
from rlhpc.algo.algorithm import Algorithm
from rlhpc.algo.objective import clipped_loss
from rlhpc.algo.responses import Estimate, Responses
from rlhpc.config.algorithm import AlgorithmSection


def group_advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    """Every token has its response's advantage over the others of the group."""
    advantages = group_relative(responses.rewards, responses.groups, section.normalise_std, section.std_epsilon)
    return Estimate(responses.spread(advantages))


GRPO = Algorithm("grpo", group_advantage, clipped_loss)
DR_GRPO = replace(GRPO, name="dr_grpo")
DAPO = replace(GRPO, name="dapo")

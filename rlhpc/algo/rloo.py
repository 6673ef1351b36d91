"""RLOO: the baseline of a response is the mean reward of the others to its prompt (Ahmadian et al. 2024)."""

from __future__ import annotations

from rlhpc.algo.advantages import leave_one_out
from rlhpc.algo.algorithm import Algorithm, Estimate, Responses
from rlhpc.algo.objective import clipped_loss
from rlhpc.config.algorithm import AlgorithmSection


def _advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    return Estimate(responses.spread(leave_one_out(responses.rewards, responses.groups)))


RLOO = Algorithm("rloo", _advantage, clipped_loss)

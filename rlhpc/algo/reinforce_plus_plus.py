"""REINFORCE++: rewards to go, whitened over the whole batch; with baseline, over groups first (Hu et al. 2025)."""

from __future__ import annotations

from rlhpc.algo.advantages import discounted_returns, group_relative, whiten
from rlhpc.algo.algorithm import Algorithm, Estimate, Responses
from rlhpc.algo.objective import clipped_loss
from rlhpc.config.algorithm import AlgorithmSection


def _advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    returns = discounted_returns(responses.token_rewards, responses.mask, responses.lengths, section.gamma)
    return Estimate(whiten(returns, responses.mask))


def _baseline_advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    centred = group_relative(responses.rewards, responses.groups, section.std_epsilon, normalise_std=False)
    return Estimate(whiten(responses.spread(centred), responses.mask))


REINFORCE_PLUS_PLUS = Algorithm("reinforce_plus_plus", _advantage, clipped_loss)
REINFORCE_PLUS_PLUS_BASELINE = Algorithm("reinforce_plus_plus_baseline", _baseline_advantage, clipped_loss)

"""ReMax: the baseline is the reward of the greedy response to the same prompt (Li et al. 2024)."""

from __future__ import annotations

from rlhpc.algo.advantages import discounted_returns
from rlhpc.algo.algorithm import Algorithm, Estimate, Responses
from rlhpc.algo.objective import clipped_loss
from rlhpc.config.algorithm import AlgorithmSection


def _advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    assert responses.baselines is not None, "the trainer generates them, for needs_greedy"
    returns = discounted_returns(responses.token_rewards, responses.mask, responses.lengths, gamma=1.0)
    return Estimate(returns - responses.spread(responses.baselines))


REMAX = Algorithm("remax", _advantage, clipped_loss, needs_greedy=True)

"""PPO: advantages from a critic, whitened over the whole batch, clipped surrogate (Schulman et al. 2017)."""

from __future__ import annotations

from rlhpc.algo.advantages import generalised, whiten
from rlhpc.algo.algorithm import Algorithm, Estimate, Responses
from rlhpc.algo.objective import clipped_loss
from rlhpc.config.algorithm import AlgorithmSection


def _advantage(responses: Responses, section: AlgorithmSection) -> Estimate:
    assert responses.values is not None, "PPO without a critic's values"
    estimate = generalised(
        responses.token_rewards,
        responses.values,
        responses.mask,
        responses.lengths,
        section.gamma,
        section.gae_lambda,
    )
    return Estimate(whiten(estimate.advantages, responses.mask), estimate.returns)


PPO = Algorithm("ppo", _advantage, clipped_loss, needs_critic=True)

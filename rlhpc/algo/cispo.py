"""CISPO: the importance weight is bounded, no token loses its gradient (MiniMax 2025)."""

from __future__ import annotations

from rlhpc.algo.algorithm import Algorithm
from rlhpc.algo.grpo import group_advantage
from rlhpc.algo.losses import Clip, weighted_log_likelihood
from rlhpc.algo.objective import Sums, Tokens, objective
from rlhpc.config.algorithm import AlgorithmSection


def _loss(tokens: Tokens, section: AlgorithmSection) -> Sums:
    clip = Clip.of(section)
    terms = weighted_log_likelihood(tokens["log_probs"], tokens["old_log_probs"], tokens["advantages"], clip)
    return objective(terms, tokens, section)


CISPO = Algorithm("cispo", group_advantage, _loss)

"""GSPO: the probability ratio of whole responses, clipped as one (Zheng et al. 2025)."""

from __future__ import annotations

from rlhpc.algo.algorithm import Algorithm
from rlhpc.algo.grpo import group_advantage
from rlhpc.algo.losses import Clip, sequence_surrogate
from rlhpc.algo.objective import Sums, Tokens, objective
from rlhpc.config.algorithm import AlgorithmSection


def _loss(tokens: Tokens, section: AlgorithmSection) -> Sums:
    weight = tokens["weight"]
    terms = sequence_surrogate(
        tokens["log_probs"],
        tokens["old_log_probs"],
        tokens["advantages"],
        (weight > 0).to(weight.dtype),
        tokens["sequence"],
        Clip.of(section),
    )
    return objective(terms, tokens, section)


GSPO = Algorithm("gspo", group_advantage, _loss)

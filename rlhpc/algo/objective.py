"""The objective: policy loss, KL and entropy terms, summed over a packed batch."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from rlhpc.algo.kl import MOST_K3, kl_divergence
from rlhpc.algo.losses import Clip, PolicyTerms, clipped_surrogate
from rlhpc.algo.rollout_correction import importance_weights
from rlhpc.config.algorithm import AlgorithmSection

Tokens = Mapping[str, Tensor]
Sums = dict[str, Float[Tensor, ""]]


def objective(terms: PolicyTerms, tokens: Tokens, section: AlgorithmSection) -> Sums:
    """Policy loss, with rollout correction if configured, plus KL (unless it is in the reward), less entropy."""
    weight = tokens["weight"]
    policy, sums = terms.loss, {}
    if section.rollout_correction.method != "none":
        mask = (weight > 0).to(weight.dtype)
        importance = importance_weights(
            tokens["old_log_probs"], tokens["engine_log_probs"], mask, tokens["sequence"], section.rollout_correction
        )
        policy = policy * importance.weights
        sums = {
            "rollout_correction_weight": (importance.weights * weight).sum(),
            "rollout_correction_fraction": (importance.outside * weight).sum(),
        }
    if terms.dual_clipped is not None:
        sums["dual_clip_fraction"] = (terms.dual_clipped * weight).sum()
    sums["policy_loss"] = loss = (policy * weight).sum()
    sums["clip_fraction"] = (terms.clipped * weight).sum()
    sums["entropy"] = (tokens["entropy"] * weight).sum()
    if section.entropy_coefficient:
        loss = loss - section.entropy_coefficient * sums["entropy"]
    if section.kl.placement == "loss" and "reference_log_probs" in tokens:
        divergence = kl_divergence(tokens["log_probs"], tokens["reference_log_probs"], section.kl.estimator)
        sums["kl"] = (divergence * weight).sum()
        if section.kl.estimator == "k3":
            sums["kl_clip_fraction"] = ((divergence >= MOST_K3) * weight).sum()
        loss = loss + section.kl.coefficient * sums["kl"]
    return {"loss": loss, **sums}


def clipped_loss(tokens: Tokens, section: AlgorithmSection) -> Sums:
    """The objective with PPO's clipped surrogate, which most algorithms share."""
    terms = clipped_surrogate(
        tokens["log_probs"],
        tokens["old_log_probs"],
        tokens["advantages"],
        Clip.of(section),
        section.dual_clip,
    )
    return objective(terms, tokens, section)

"""The objective: policy loss, KL and entropy terms, summed over a packed batch.

KL divergence from the reference model has several estimators and an adaptive coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from rlhpc.algo.losses import Clip, PolicyTerms, clipped_surrogate, importance_weights
from rlhpc.config.algorithm import AlgorithmSection, KLSection

Tokens = Mapping[str, Tensor]
Sums = dict[str, Float[Tensor, ""]]
MOST_K3 = 10.0  # of a token; beyond it k3 is constant and has no gradient
_MOST_CHANGE = 0.2  # of the coefficient, per horizon
_LEAST_FACTOR = 0.1  # in a step: one of many horizons would turn the coefficient's sign


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


def kl_divergence(
    log_probs: Float[Tensor, " T"], reference_log_probs: Float[Tensor, " T"], estimator: str
) -> Float[Tensor, " T"]:
    """Per-token estimate of KL(policy, reference) (Schulman 2020): k1 unbiased, k2 low variance, k3 both."""
    difference = log_probs - reference_log_probs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            # The reverse log-ratio bounded as in verl, so that one token's exponential cannot dominate the batch.
            reverse = (-difference).clamp(-20, 20)
            return (reverse.exp() - reverse - 1).clamp(max=MOST_K3)
    raise AssertionError(f"unknown estimator {estimator}")


def adapted_coefficient(coefficient: float, divergence: float, responses: int, section: KLSection) -> float:
    """The next step's coefficient after ``responses`` with that mean divergence (Ziegler et al. 2019, section 2.2)."""
    if section.target is None:
        return coefficient
    error = min(max(divergence / section.target - 1, -_MOST_CHANGE), _MOST_CHANGE)
    return coefficient * max(1 + error * responses / section.horizon, _LEAST_FACTOR)


def with_coefficient(section: AlgorithmSection, coefficient: float) -> AlgorithmSection:
    """The section with the current coefficient."""
    return section.model_copy(update={"kl": section.kl.model_copy(update={"coefficient": coefficient})})

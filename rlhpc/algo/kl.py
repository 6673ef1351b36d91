"""KL divergence from the reference model: its estimators, and its adaptive coefficient."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from rlhpc.config.algorithm import AlgorithmSection, KLSection

MOST_K3 = 10.0  # of a token; beyond it k3 is constant and has no gradient

_MOST_CHANGE = 0.2  # of the coefficient, per horizon
_LEAST_FACTOR = 0.1  # in a step: one of many horizons would turn the coefficient's sign


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

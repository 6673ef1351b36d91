"""GRPO: group-relative advantages, clipped surrogate, KL to a reference in the loss (Shao et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.algo.advantages import group_relative
from rlhpc.algo.algorithm import Algorithm
from rlhpc.algo.losses import clipped_policy_loss, kl_divergence
from rlhpc.config.schema import AlgorithmSection


def _advantage(
    rewards: Float[Tensor, " B"], groups: Int64[Tensor, " B"], section: AlgorithmSection
) -> Float[Tensor, " B"]:
    return group_relative(rewards, groups, section.normalise_std, section.std_epsilon)


def _loss(tokens: Mapping[str, Float[Tensor, " T"]], section: AlgorithmSection) -> dict[str, Float[Tensor, ""]]:
    log_probs, weight = tokens["log_probs"], tokens["weight"]
    policy = clipped_policy_loss(
        log_probs, tokens["old_log_probs"], tokens["advantages"], weight, section.clip_low, section.clip_high
    )
    entropy = (tokens["entropy"] * weight).sum()
    sums = {"loss": policy.loss, "policy_loss": policy.loss, "clip_fraction": policy.clipped, "entropy": entropy}
    if section.entropy_coefficient:
        sums["loss"] = sums["loss"] - section.entropy_coefficient * entropy
    if "reference_log_probs" in tokens:
        divergence = kl_divergence(log_probs, tokens["reference_log_probs"], section.kl.estimator)
        sums["kl"] = (divergence * weight).sum()
        sums["loss"] = sums["loss"] + section.kl.coefficient * sums["kl"]
    return sums


GRPO = Algorithm("grpo", _advantage, _loss)

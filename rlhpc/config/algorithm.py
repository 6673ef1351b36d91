"""The algorithm's section: advantages and losses.

Defaults are GRPO's; the other built-in algorithms replace some of them with those in ``DEFAULTS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhpc.config.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Share

_NO_KL = {"coefficient": 0.0}
_KL_IN_REWARD = {"estimator": "k1", "placement": "reward"}

# Built-in algorithms by name, with the keys whose default differs from that in the sections below.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalise_std": False, "aggregation": "constant", "kl": _NO_KL},
    "dapo": {"clip_high": 0.28, "kl": _NO_KL},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence-mean", "kl": _NO_KL},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "kl": _NO_KL},
    "rloo": {"kl": _KL_IN_REWARD},
    "reinforce_plus_plus": {"kl": _KL_IN_REWARD},
    "reinforce_plus_plus_baseline": {"kl": {"estimator": "k2"}},
    "remax": {"kl": _KL_IN_REWARD},
    "ppo": {"kl": _KL_IN_REWARD},
}


WITH_CRITIC = ("ppo",)  # built-in algorithms that train a critic


class KLSection(Section):
    coefficient: NonNegativeFloat = 0.001
    """Weight of the KL term; 0: no reference model is built. dr_grpo, dapo, gspo, cispo: 0."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator (Schulman 2020, http://joschu.net/blog/kl-approx.html). rloo, reinforce_plus_plus, remax,
    ppo: k1; reinforce_plus_plus_baseline: k2."""
    placement: Literal["loss", "reward"] = "loss"
    """Placement of the KL term: in the loss, or in each token's reward. rloo, reinforce_plus_plus, remax, ppo:
    reward."""
    target: PositiveFloat | None = None
    """Target of the mean KL per token for the adaptive coefficient (Ziegler et al. 2019); default: constant
    coefficient."""
    horizon: PositiveInt = 10_000
    """Adaptive-KL horizon, in responses, with target."""


class RolloutCorrectionSection(Section):
    """Importance weights of the policy loss, trainer's over engine's probability, that correct for their mismatch."""

    method: Literal["none", "truncate", "mask"] = "none"
    """Method: truncate bounds weights at high (TIS); mask sets weights outside [low, high] to 0 (IcePop)."""
    level: Literal["token", "sequence"] = "token"
    """Level of a weight: per token, or the product over the response for all of its tokens."""
    low: NonNegativeFloat = 0.5
    """Lower bound of weights, with mask."""
    high: PositiveFloat = 2.0
    """Upper bound of weights."""


class AlgorithmSection(Section):
    name: str = "grpo"
    """Name: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, ppo,
    or package.module:attribute of your own algorithm."""
    clip_low: Fraction = 0.2
    """Lower clip range: ratios are clipped to [1 - clip_low, 1 + clip_high]; 1: none. gspo: 0.0003; cispo: 1."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range. dapo: 0.28; gspo: 0.0004; cispo: 4."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual-clip bound of the ratio where the advantage is negative (Ye et al. 2020); default: none."""
    normalise_std: bool = True
    """Division of a group's advantages by their standard deviation. dr_grpo: false."""
    std_epsilon: PositiveFloat = 1e-6
    """Constant added to that standard deviation."""
    gamma: Share = 1.0
    """Discount factor per token, for reinforce_plus_plus and ppo."""
    gae_lambda: Share = 1.0
    """Lambda of generalised advantage estimation, for ppo (Schulman et al. 2016); 1: rewards only, 0: bootstrapped from
    the critic after one token."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """Mean of the loss over response tokens, over sequences of token means, or over sequences of token sums divided by
    aggregation_length. gspo: sequence-mean; dr_grpo: constant."""
    aggregation_length: PositiveInt | None = None
    """Divisor of token sums with constant; default: rollout.max_response_tokens."""
    kl: KLSection = KLSection()
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, which is subtracted from the loss."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        """Fills in the named algorithm's own defaults."""
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            return data
        merged = {**DEFAULTS.get(data["name"], {}), **data}
        own = DEFAULTS.get(data["name"], {}).get("kl")
        if own and isinstance(data.get("kl", {}), dict):
            merged["kl"] = {**own, **data.get("kl", {})}
        return merged

"""The algorithm's section: what advantages and losses are made of.

Defaults are GRPO's; another algorithm of ours puts those of ``DEFAULTS`` in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhpc.config.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Share

_NO_KL = {"coefficient": 0.0}
_KL_IN_REWARD = {"estimator": "k1", "placement": "reward"}

# Every algorithm of ours by name, and the keys whose default is not the one in the sections below.
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


WITH_CRITIC = ("ppo",)  # of these


class KLSection(Section):
    coefficient: NonNegativeFloat = 0.001
    """Weight of the KL term; 0: no reference model is built. dr_grpo, dapo, gspo, cispo: 0."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator (Schulman 2020, http://joschu.net/blog/kl-approx.html). rloo, reinforce_plus_plus, remax,
    ppo: k1; reinforce_plus_plus_baseline: k2."""
    placement: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from each token's reward before advantages are made of it. rloo,
    reinforce_plus_plus, remax, ppo: reward."""
    target: PositiveFloat | None = None
    """Mean divergence of a token that the coefficient is steered to, step by step (Ziegler et al. 2019); default: it
    stays as it is."""
    horizon: PositiveInt = 10_000
    """With target: in so many responses the coefficient changes by a fifth at most."""


class RolloutCorrectionSection(Section):
    """Weights by which the policy loss makes up for responses that the engine drew a little otherwise than the trainer
    would have: trainer's over engine's probability."""

    method: Literal["none", "truncate", "mask"] = "none"
    """truncate: weights above high become high (TIS); mask: those outside [low, high] become 0 (IcePop)."""
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or the product of its response's for all of them."""
    low: NonNegativeFloat = 0.5
    """With mask: the least weight that is kept."""
    high: PositiveFloat = 2.0
    """The largest weight."""


class AlgorithmSection(Section):
    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, ppo,
    or package.module:attribute of an algorithm of your own."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]; 1: not from below. gspo: 0.0003; cispo: 1."""
    clip_high: PositiveFloat = 0.2
    """See clip_low. dapo: 0.28; gspo: 0.0004; cispo: 4."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative, most that a ratio counts (Ye et al. 2020); default: no bound."""
    normalise_std: bool = True
    """Divide a group's advantages by their standard deviation. dr_grpo: false."""
    std_epsilon: PositiveFloat = 1e-6
    """Added to that deviation."""
    gamma: Share = 1.0
    """reinforce_plus_plus, ppo: what a token's reward is worth one token earlier."""
    gae_lambda: Share = 1.0
    """ppo: lambda of generalised advantages (Schulman et al. 2016); 1: rewards alone, 0: the critic's word for all that
    follows the next token."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """Mean over all response tokens of the batch, over sequences of each one's token mean, or over sequences of each
    one's token sum divided by aggregation_length. gspo: sequence-mean; dr_grpo: constant."""
    aggregation_length: PositiveInt | None = None
    """With constant: what token sums are divided by; default: rollout.max_response_tokens."""
    kl: KLSection = KLSection()
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()

    @model_validator(mode="before")
    @classmethod
    def _lay_over_defaults(cls, data: Any) -> Any:
        """What is given, over the named algorithm's own defaults."""
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            return data
        merged = {**DEFAULTS.get(data["name"], {}), **data}
        own = DEFAULTS.get(data["name"], {}).get("kl")
        if own and isinstance(data.get("kl", {}), dict):
            merged["kl"] = {**own, **data.get("kl", {})}
        return merged

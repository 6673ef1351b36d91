"""The mathematics of RL on plain tensors. No collective, no model, no state.

An algorithm is a file here, a line in ``ALGORITHMS`` and one in ``rlhpc.config.algorithm.DEFAULTS``.
"""

from __future__ import annotations

from rlhpc.algo.algorithm import Algorithm, Estimate, Responses
from rlhpc.algo.cispo import CISPO
from rlhpc.algo.grpo import DAPO, DR_GRPO, GRPO
from rlhpc.algo.gspo import GSPO
from rlhpc.algo.ppo import PPO
from rlhpc.algo.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE
from rlhpc.algo.remax import REMAX
from rlhpc.algo.rloo import RLOO
from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.imports import import_attribute

__all__ = ["ALGORITHMS", "Algorithm", "Estimate", "Responses", "find_algorithm"]

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS,
    "reinforce_plus_plus_baseline": REINFORCE_PLUS_PLUS_BASELINE,
    "remax": REMAX,
    "ppo": PPO,
}


def find_algorithm(section: AlgorithmSection) -> Algorithm:
    """The algorithm of that name, or a user's own by ``module:attribute``."""
    if section.name in ALGORITHMS:
        return ALGORITHMS[section.name]
    if ":" in section.name:
        found = import_attribute(section.name, where="algorithm.name")
        if not isinstance(found, Algorithm):
            raise UserError(
                f"{section.name!r} is a {type(found).__name__}",
                where="algorithm.name",
                remedy="name a value of type rlhpc.algo.Algorithm",
            )
        return found
    raise UserError(
        f"unknown algorithm {section.name!r}", where="algorithm.name", remedy=did_you_mean(section.name, ALGORITHMS)
    )

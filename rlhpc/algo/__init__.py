"""Layer 2: the mathematics of RL on plain tensors. No collective, no model, no state.

An algorithm is a file here and a line in ``ALGORITHMS``.
"""

from __future__ import annotations

from rlhpc.algo.algorithm import Algorithm
from rlhpc.algo.grpo import GRPO
from rlhpc.config.schema import AlgorithmSection
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.imports import import_attribute

__all__ = ["ALGORITHMS", "Algorithm", "find_algorithm"]

ALGORITHMS: dict[str, Algorithm] = {"grpo": GRPO}


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

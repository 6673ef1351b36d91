"""What an algorithm is: how rewards become advantages, and what is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.config.schema import AlgorithmSection

# (rewards [B], group ids [B], section) -> advantages [B]
AdvantageFunction = Callable[
    [Float[Tensor, " B"], Int64[Tensor, " B"], AlgorithmSection],
    Float[Tensor, " B"],
]
# (token tensors [T] by name, section) -> sums by name; "loss" is differentiated, the others are reported.
# Of names: log_probs and entropy (with gradient), old_log_probs, advantages, weight, engine_log_probs, and
# reference_log_probs where the algorithm needs a reference model.
PolicyLoss = Callable[[Mapping[str, Float[Tensor, " T"]], AlgorithmSection], dict[str, Float[Tensor, ""]]]


@dataclass(frozen=True)
class Algorithm:
    name: str
    advantage: AdvantageFunction
    loss: PolicyLoss

    def needs_reference(self, section: AlgorithmSection) -> bool:
        """Whether log-probs under the reference model enter the loss."""
        return section.kl.coefficient > 0

"""An algorithm: a function from rewards to advantages, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlhpc.algo.responses import Estimate, Responses
from rlhpc.config.algorithm import AlgorithmSection

# (a whole step's responses, section) -> advantages of their tokens [N]; called with the same arguments on every rank
AdvantageFunction = Callable[[Responses, AlgorithmSection], Estimate]
# (token tensors [T] by name, section) -> sums by name; "loss" is differentiated, the others are metrics.
# Names: log_probs and entropy (with gradient), old_log_probs, engine_log_probs, advantages, weight, sequence (which
# of the batch's sequences a token belongs to), and reference_log_probs where there is a reference model.
PolicyLoss = Callable[[Mapping[str, Tensor], AlgorithmSection], dict[str, Float[Tensor, ""]]]


@dataclass(frozen=True)
class Algorithm:
    name: str
    advantage: AdvantageFunction
    loss: PolicyLoss
    needs_greedy: bool = False  # the greedy response to each prompt is generated and scored too: Responses.baselines
    needs_critic: bool = False  # a critic gives each token's value, and is trained on the estimate's returns

    def needs_reference(self, section: AlgorithmSection) -> bool:
        """Whether log-probs under the reference model enter the loss or the reward."""
        return section.kl.coefficient > 0

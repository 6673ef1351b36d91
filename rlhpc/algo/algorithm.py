"""What an algorithm is: how rewards become advantages, and what is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlhpc.algo.responses import Estimate, Responses
from rlhpc.config.algorithm import AlgorithmSection

# (a whole step's responses, section) -> advantages of their tokens [N]; called alike on every rank
AdvantageFunction = Callable[[Responses, AlgorithmSection], Estimate]
# (token tensors [T] by name, section) -> sums by name; "loss" is differentiated, the others are reported.
# Of names: log_probs and entropy (with gradient), old_log_probs, engine_log_probs, advantages, weight, sequence (which
# of the batch's sequences a token belongs to), and reference_log_probs where there is a reference model.
PolicyLoss = Callable[[Mapping[str, Tensor], AlgorithmSection], dict[str, Float[Tensor, ""]]]


@dataclass(frozen=True)
class Algorithm:
    name: str
    advantage: AdvantageFunction
    loss: PolicyLoss
    needs_greedy: bool = False  # the likeliest response to each prompt is drawn and scored too: Responses.baselines

    needs_critic: bool = False  # a critic says what each token promises, and learns the estimate's returns

    def needs_reference(self, section: AlgorithmSection) -> bool:
        """Whether log-probs under the reference model enter the loss or the reward."""
        return section.kl.coefficient > 0

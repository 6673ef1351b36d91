"""The configured functions called in this process: no time limit, and a failure is an error at once."""

from __future__ import annotations

from collections.abc import Callable

from rlhpc.api import Prompt
from rlhpc.config.reward import RewardSection
from rlhpc.core.errors import UserError
from rlhpc.rewards.calls import Failure, load_function
from rlhpc.rewards.judge import entries_of


def load_reward(section: RewardSection) -> Callable[[Prompt, str], float]:
    """The configured reward as ``score(prompt, response text)``."""
    loaded = [(function.weight, entry, load_function(entry)) for function, entry in entries_of(section)]

    def score(prompt: Prompt, response: str) -> float:
        keywords = {
            "data_source": prompt.data_source,
            "solution_str": response,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "response_tokens": 0,
            "max_response_tokens": 1,
        }
        total = 0.0
        for weight, entry, function in loaded:
            outcome = function(keywords)
            if isinstance(outcome, Failure):
                raise UserError(
                    f"{outcome.what} for prompt {prompt.prompt_id} of {prompt.data_source!r}, "
                    f"response {response[:80]!r}",
                    where=f"{entry.where} {entry.path}",
                    remedy="make it return a finite number for every response",
                )
            total += weight * outcome.value
        return total

    return score

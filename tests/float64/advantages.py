"""Advantages of a step, written out token by token in float64, with the source of each formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhpc.config.algorithm import AlgorithmSection
from tests.float64.answers import Answer


@dataclass
class Estimate:
    """By response and place of a token that is trained on."""

    advantages: list[dict[int, float]]
    returns: list[dict[int, float]] = field(default_factory=list)  # the critic's targets


def others_of(answers: list[Answer], answer: Answer) -> list[Answer]:
    """The group of a response, itself included."""
    return [other for other in answers if other.group == answer.group]


def mean_of(rewards: list[float]) -> float:
    """The mean, which of equal numbers is that number."""
    return rewards[0] if min(rewards) == max(rewards) else sum(rewards) / len(rewards)


def group_relative(answers: list[Answer], answer: Answer, section: AlgorithmSection) -> float:
    """(r_i - mean(r)) / (std(r) + epsilon) over the group: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2;
    the deviation with n - 1, as in verl. Without the division Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), section
    3.2. A group of one has nothing to compare with: 0."""
    rewards = [other.total for other in others_of(answers, answer)]
    mean = mean_of(rewards)
    if not section.normalise_std or len(rewards) == 1:
        return answer.total - mean
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return (answer.total - mean) / (deviation + section.std_epsilon)


def spread(answers: list[Answer], value: Callable[[Answer], float]) -> list[dict[int, float]]:
    """The same value at each token of a response that is trained on."""
    return [{t: value(answer) for t in answer.trained} for answer in answers]


def whitened(values: list[dict[int, float]]) -> list[dict[int, float]]:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the batch, with n - 1: Schulman et al. 2017 in their code,
    Hu et al. 2025 (arXiv 2501.03262), section 3."""
    every = [value for response in values for value in response.values()]
    if len(every) < 2:
        return values
    mean = mean_of(every)
    variance = sum((value - mean) ** 2 for value in every) / (len(every) - 1)
    return [{t: (value - mean) / math.sqrt(variance + 1e-8) for t, value in response.items()} for response in values]


def reward_at(answer: Answer, t: int) -> float:
    """The reward at the last token trained on, less each token's KL penalty (Ouyang et al. 2022, equation 2)."""
    return (answer.reward if t == answer.trained[-1] else 0.0) - answer.penalty.get(t, 0.0)


def to_go(answer: Answer, gamma: float) -> dict[int, float]:
    """G_t = r_t + gamma G_t', t' being the next token that the policy sampled."""
    following, found = 0.0, {}
    for t in reversed(answer.trained):
        following = reward_at(answer, t) + gamma * following
        found[t] = following
    return {t: found[t] for t in answer.trained}


def grpo(answers: list[Answer], section: AlgorithmSection) -> Estimate:
    """See ``group_relative``."""
    return Estimate(spread(answers, lambda answer: group_relative(answers, answer, section)))


def rloo(answers: list[Answer], section: AlgorithmSection) -> Estimate:
    """r_i - mean of the others' rewards, which is n / (n - 1) (r_i - mean(r)): Ahmadian et al. 2024 (arXiv 2402.14740),
    equation 8."""

    def advantage(answer: Answer) -> float:
        rewards = [other.total for other in others_of(answers, answer)]
        return len(rewards) / max(len(rewards) - 1, 1) * (answer.total - mean_of(rewards))

    return Estimate(spread(answers, advantage))


def reinforce_plus_plus(answers: list[Answer], section: AlgorithmSection) -> Estimate:
    """Discounted rewards to go, whitened over the batch: Hu et al. 2025 (arXiv 2501.03262), equations 5 and 6."""
    return Estimate(whitened([to_go(answer, section.gamma) for answer in answers]))


def reinforce_plus_plus_baseline(answers: list[Answer], section: AlgorithmSection) -> Estimate:
    """r_i less the group's mean, whitened over the batch: the same paper, section 3.3."""

    def centred(answer: Answer) -> float:
        return answer.total - mean_of([other.total for other in others_of(answers, answer)])

    return Estimate(whitened(spread(answers, centred)))


def remax(answers: list[Answer], section: AlgorithmSection) -> Estimate:
    """Rewards to go less the greedy response's reward: Li et al. 2024 (arXiv 2310.10505), algorithm 1."""
    found = []
    for answer in answers:
        found.append({t: value - answer.baseline for t, value in to_go(answer, 1.0).items()})
    return Estimate(found)


def ppo(answers: list[Answer], section: AlgorithmSection) -> Estimate:
    """GAE: delta_t = r_t + gamma V_t' - V_t, A_t = delta_t + gamma lambda A_t' (Schulman et al. 2016, arXiv 1506.02438,
    equations 11 and 16); whitened for the actor. The critic's targets are A_t + V_t."""
    advantages, returns = [], []
    for answer in answers:
        found: dict[int, float] = {}
        later, value_later = 0.0, 0.0
        for t in reversed(answer.trained):
            delta = reward_at(answer, t) + section.gamma * value_later - answer.values[t]
            later = delta + section.gamma * section.gae_lambda * later
            value_later = answer.values[t]
            found[t] = later
        advantages.append({t: found[t] for t in answer.trained})
        returns.append({t: found[t] + answer.values[t] for t in answer.trained})
    return Estimate(whitened(advantages), returns)


ADVANTAGES: dict[str, Callable[[list[Answer], AlgorithmSection], Estimate]] = {
    "grpo": grpo,
    "dr_grpo": grpo,
    "dapo": grpo,
    "gspo": grpo,
    "cispo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "ppo": ppo,
}

"""Metrics of the responses to held-out prompts, as pure functions of their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb

Metrics = dict[str, float]
OVERALL = ""
BY_SET, BY_SOURCE = "by_set/", "by_source/"


@dataclass(frozen=True)
class ScoredResponse:
    """A response with its reward. ``prompt`` numbers the prompts, ``length`` is in tokens, ``answer`` as in
    ``RewardResult``."""

    prompt: int
    set_name: str
    source: str
    reward: float
    length: int
    truncated: bool
    answer: str | None = None


def pass_at(n: int, correct: int, count: int) -> float:
    """Probability that at least one of n responses is correct, estimated from ``count`` responses of which ``correct``
    are. Unbiased: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    return 1.0 - comb(count - correct, n) / comb(count, n)


def majority(answers: Sequence[tuple[str | None, bool]]) -> float:
    """Share of correct responses among those with a prompt's most frequent answer: 1 or 0 if equal answers have equal
    rewards. The mean over answers that tie; 0 without any answer.

    ``answers``: each response's answer, and whether it is correct.
    """
    votes: dict[str, list[bool]] = {}
    for answer, correct in answers:
        if answer:
            votes.setdefault(answer, []).append(correct)
    most = max(map(len, votes.values()), default=0)
    first = [sum(members) / most for members in votes.values() if len(members) == most]
    return sum(first) / len(first) if first else 0.0


def evaluation_metrics(answers: Sequence[ScoredResponse], success: float) -> Metrics:
    """Metrics of all responses, and with the prefixes ``by_set/NAME/`` and ``by_source/NAME/`` those of named sets and,
    if there are several, of data sources. Every prompt has the same number k of responses.

    A response is correct if its reward is at least ``success``. ``pass@n`` is for n = 1, 2, 4 … and k; ``maj@k`` is
    there if rewards return answers.
    """
    return {
        group + name: value
        for group, members in _groups(answers)
        for name, value in _metrics_of(members, success).items()
    }


def _groups(answers: Sequence[ScoredResponse]) -> Iterator[tuple[str, list[ScoredResponse]]]:
    yield OVERALL, list(answers)
    for name in sorted({answer.set_name for answer in answers} - {""}):
        yield f"{BY_SET}{name}/", [answer for answer in answers if answer.set_name == name]
    sources = sorted({answer.source for answer in answers})
    for name in sources if len(sources) > 1 else ():
        yield f"{BY_SOURCE}{name}/", [answer for answer in answers if answer.source == name]


def _metrics_of(answers: Sequence[ScoredResponse], success: float) -> Metrics:
    by_prompt: dict[int, list[tuple[str | None, bool]]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt, []).append((answer.answer, answer.reward >= success))
    correct = {prompt: sum(good for _, good in given) for prompt, given in by_prompt.items()}
    votes = len(answers) > len(correct) and any(answer.answer is not None for answer in answers)
    count = len(answers) // len(correct)
    mean_reward = sum(answer.reward for answer in answers) / len(answers)
    return {
        "reward_mean": mean_reward,
        **({f"mean@{count}": mean_reward} if count > 1 else {}),
        **{f"pass@{n}": sum(pass_at(n, c, count) for c in correct.values()) / len(correct) for n in _pass_sizes(count)},
        **({f"maj@{count}": sum(map(majority, by_prompt.values())) / len(correct)} if votes else {}),
        "response_length": sum(answer.length for answer in answers) / len(answers),
        "truncated_fraction": sum(answer.truncated for answer in answers) / len(answers),
    }


def _pass_sizes(count: int) -> list[int]:
    """1, 2, 4 … and ``count`` itself."""
    return sorted({*(1 << power for power in range(count.bit_length())), count})

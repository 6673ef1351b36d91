"""How good the answers to held-out prompts are: pure functions of their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb

Metrics = dict[str, float]
OVERALL = ""
BY_SET, BY_SOURCE = "by_set/", "by_source/"


@dataclass(frozen=True)
class Answer:
    """One response. ``prompt`` is the number of its prompt, ``length`` in tokens."""

    prompt: int
    set_name: str
    source: str
    reward: float
    length: int
    truncated: bool


def pass_at(n: int, correct: int, count: int) -> float:
    """The chance that one of n responses, drawn from ``count`` of which ``correct`` are, is correct.

    Chen et al. 2021 (arXiv 2107.03374), equation 1, which is unbiased.
    """
    return 1.0 - comb(count - correct, n) / comb(count, n)


def evaluation_metrics(answers: Sequence[Answer], success: float) -> Metrics:
    """Metrics of all answers, and after ``by_set/NAME/`` and ``by_source/NAME/`` those of the named sets and of the
    data sources, where there are several. Every prompt has the same number of answers.

    ``accuracy`` is the mean reward; ``pass@n`` for 1, 2, 4 … and all of a prompt's answers counts those of a reward of
    at least ``success``.
    """
    return {
        group + name: value
        for group, members in _groups(answers)
        for name, value in _metrics_of(members, success).items()
    }


def _groups(answers: Sequence[Answer]) -> Iterator[tuple[str, list[Answer]]]:
    yield OVERALL, list(answers)
    for name in sorted({answer.set_name for answer in answers} - {""}):
        yield f"{BY_SET}{name}/", [answer for answer in answers if answer.set_name == name]
    sources = sorted({answer.source for answer in answers})
    for name in sources if len(sources) > 1 else ():
        yield f"{BY_SOURCE}{name}/", [answer for answer in answers if answer.source == name]


def _metrics_of(answers: Sequence[Answer], success: float) -> Metrics:
    correct: dict[int, int] = {}
    for answer in answers:
        correct[answer.prompt] = correct.get(answer.prompt, 0) + (answer.reward >= success)
    count = len(answers) // len(correct)
    mean_reward = sum(answer.reward for answer in answers) / len(answers)
    return {
        "accuracy": mean_reward,
        **({f"mean@{count}": mean_reward} if count > 1 else {}),
        **{f"pass@{n}": sum(pass_at(n, c, count) for c in correct.values()) / len(correct) for n in _draws(count)},
        "response_length": sum(answer.length for answer in answers) / len(answers),
        "truncated_fraction": sum(answer.truncated for answer in answers) / len(answers),
    }


def _draws(count: int) -> list[int]:
    """1, 2, 4 … and ``count`` itself."""
    return sorted({*(1 << power for power in range(count.bit_length())), count})

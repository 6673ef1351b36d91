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
    """One response. ``prompt`` is the number of its prompt, ``length`` in tokens; ``answer`` as in ``RewardResult``."""

    prompt: int
    set_name: str
    source: str
    reward: float
    length: int
    truncated: bool
    answer: str | None = None


def pass_at(n: int, correct: int, count: int) -> float:
    """The chance that one of n responses, drawn from ``count`` of which ``correct`` are, is correct.

    Chen et al. 2021 (arXiv 2107.03374), equation 1, which is unbiased.
    """
    return 1.0 - comb(count - correct, n) / comb(count, n)


def majority(answers: Sequence[tuple[str | None, bool]]) -> float:
    """How good the answer is that most of a prompt's responses give: the share of these that are correct, which is 1 or
    0 if equal answers are judged alike. Of answers given equally often the mean; 0 where there is none.

    ``answers``: each response's, and whether it is correct.
    """
    votes: dict[str, list[bool]] = {}
    for answer, correct in answers:
        if answer:
            votes.setdefault(answer, []).append(correct)
    most = max(map(len, votes.values()), default=0)
    first = [sum(members) / most for members in votes.values() if len(members) == most]
    return sum(first) / len(first) if first else 0.0


def evaluation_metrics(answers: Sequence[Answer], success: float) -> Metrics:
    """Metrics of all answers, and after ``by_set/NAME/`` and ``by_source/NAME/`` those of the named sets and of the
    data sources, where there are several. Every prompt has the same number of answers.

    ``reward_mean`` is that of all responses; ``pass@n`` for 1, 2, 4 … and all of a prompt's answers counts those of a
    reward of at least ``success``, and so does ``maj@k`` of all k of them, where rewards tell answers.
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
        **{f"pass@{n}": sum(pass_at(n, c, count) for c in correct.values()) / len(correct) for n in _draws(count)},
        **({f"maj@{count}": sum(map(majority, by_prompt.values())) / len(correct)} if votes else {}),
        "response_length": sum(answer.length for answer in answers) / len(answers),
        "truncated_fraction": sum(answer.truncated for answer in answers) / len(answers),
    }


def _draws(count: int) -> list[int]:
    """1, 2, 4 … and ``count`` itself."""
    return sorted({*(1 << power for power in range(count.bit_length())), count})

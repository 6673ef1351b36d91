"""How good answers are, against counting by hand."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from rlhpc.observe.evaluation import ScoredResponse, evaluation_metrics, majority, pass_at


def answer(prompt: int, reward: float, **changes: object) -> ScoredResponse:
    return replace(ScoredResponse(prompt, "", "a", reward, 3, False), **changes)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_pass_at_is_the_share_of_draws_with_a_correct_one(count: int):
    for correct, n in itertools.product(range(count + 1), range(1, count + 1)):
        marks = [True] * correct + [False] * (count - correct)
        draws = list(itertools.combinations(marks, n))
        assert pass_at(n, correct, count) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_is_exact_for_many_samples():
    assert pass_at(1, 37, 1000) == pytest.approx(0.037, abs=1e-12)
    assert pass_at(1000, 1, 1000) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_metrics_are_means_over_prompts_of_what_each_one_has(seed: int):
    draw = random.Random(seed)
    count, prompts = draw.choice([2, 3, 4, 6]), draw.randint(1, 5)
    rewards = {prompt: [draw.choice([0.0, 0.4, 1.0]) for _ in range(count)] for prompt in range(prompts)}
    metrics = evaluation_metrics([answer(p, r) for p, given in rewards.items() for r in given], success=0.5)
    flat = [reward for given in rewards.values() for reward in given]
    assert metrics["reward_mean"] == metrics[f"mean@{count}"] == pytest.approx(sum(flat) / len(flat))
    assert metrics["pass@1"] == pytest.approx(sum(reward >= 0.5 for reward in flat) / len(flat))
    assert metrics[f"pass@{count}"] == sum(max(given) >= 0.5 for given in rewards.values()) / prompts
    assert {name for name in metrics if name.startswith("pass@")} == {
        f"pass@{n}" for n in (1, 2, 4, count) if n <= count
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_majority_is_what_drawing_among_the_first_expects(seed: int):
    draw = random.Random(seed)
    given = [(a, a == "b") for a in draw.choices(["a", "b", "c", "", None], k=draw.randint(1, 8))]
    polls = Counter(a for a, _ in given if a).most_common()
    first = [a for a, votes in polls if votes == polls[0][1]]
    assert majority(given) == pytest.approx(first.count("b") / len(first) if first else 0.0)


def test_majorities_are_counted_where_rewards_return_answers():
    given = [("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0), ("5", 0.0), ("", 0.0), ("7", 0.0), ("9", 1.0), ("9", 1.0)]
    answers = [answer(n // 3, reward, answer=text) for n, (text, reward) in enumerate(given)]
    assert evaluation_metrics(answers, success=1.0)["maj@3"] == pytest.approx(2 / 3)
    silent = [replace(one, answer=None) for one in answers]
    assert not any(name.startswith("maj@") for name in evaluation_metrics(silent, success=1.0))
    assert not any(name.startswith("maj@") for name in evaluation_metrics(answers[::3], success=1.0))


def test_one_answer_each_has_no_mean_of_several():
    metrics = evaluation_metrics([answer(0, 1.0, length=2, truncated=True), answer(1, 0.0, length=5)], success=1.0)
    assert metrics == {
        "reward_mean": 0.5,
        "pass@1": 0.5,
        "response_length": 3.5,
        "truncated_fraction": 0.5,
    }


def test_named_sets_and_sources_have_metrics_of_their_own():
    answers = [
        answer(0, 1.0, set_name="easy"),
        answer(1, 0.0, set_name="easy", source="b/c"),
        answer(2, 0.0),
        answer(3, 0.0),
    ]
    metrics = evaluation_metrics(answers, success=1.0)
    assert {name: value for name, value in metrics.items() if name.endswith("reward_mean")} == {
        "reward_mean": 0.25,
        "by_set/easy/reward_mean": 0.5,
        "by_source/a/reward_mean": pytest.approx(1 / 3),
        "by_source/b/c/reward_mean": 0.0,
    }

"""Reward workers of the tests: responses are texts, each with its own token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Completion, Prompt, RewardResult
from rlhpc.config.reward import DEFAULT_FUNCTION, RewardFunctionSection, RewardWorkersSection
from rlhpc.rewards import pool
from rlhpc.rewards.reward_workers import FunctionRewards

HERE = "tests.rewards.functions"
LIMIT = 1.5


def sections(
    functions: Sequence[dict[str, Any]] = (), function: str = DEFAULT_FUNCTION, arguments: Any = None, **workers: Any
) -> tuple[dict[str, RewardFunctionSection], RewardWorkersSection]:
    """Several functions, or the one, by their keys; and the section of the workers."""
    given = functions or [{"function": function, "arguments": arguments or {}}]
    entries = {f"rewards.{i}": RewardFunctionSection(**each) for i, each in enumerate(given)}
    return entries, RewardWorkersSection(**workers)


class Texts:
    """Stands for a tokenizer: a response's only token is the number of its text."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def completion(self, text: str) -> Completion:
        self.texts.append(text)
        tokens = np.array([len(self.texts) - 1], dtype=np.int32)
        return Completion(tokens, np.zeros(1, dtype=np.float32), truncated=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.texts[tokens[0]]


def exclude_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclude from short time limits any time in which the machine stalls."""
    monkeypatch.setattr(pool, "_LATE_SECONDS", 0.02)


def score_all(reward_workers: FunctionRewards, responses: Sequence[str], truth: Any = "3") -> dict[int, RewardResult]:
    """Results by the responses' places."""
    texts = reward_workers.decode.__self__
    for key, text in enumerate(responses):
        reward_workers.submit(key, Prompt(10 + key, (1,), "sums", truth, {"index": key}), texts.completion(text))
    return reward_workers.results()


def failures_of(results: Mapping[int, RewardResult]) -> Counter[str]:
    """Failed calls by kind."""
    return Counter(kind for result in results.values() for kind in result.failures)

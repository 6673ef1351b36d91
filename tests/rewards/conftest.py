"""Reward workers that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlhpc.config.reward import RewardSection
from rlhpc.rewards import pool
from rlhpc.rewards.reward_workers import FunctionRewards, start_reward_workers
from tests.rewards.scoring import Texts


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start reward workers, whose short time limits exclude time in which the machine stalls."""
    monkeypatch.setattr(pool, "_LATE_SECONDS", 0.02)
    started = []

    def start(**section: Any) -> FunctionRewards:
        started.append(start_reward_workers(RewardSection(**section), Texts().decode, max_response_tokens=20))
        return started[-1]

    yield start
    for reward_workers in started:
        reward_workers.close()

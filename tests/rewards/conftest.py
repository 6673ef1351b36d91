"""Judges that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlhpc.config.reward import RewardSection
from rlhpc.rewards import pool
from rlhpc.rewards.judge import RewardJudge, load_judge
from tests.rewards.judging import Texts


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start judges. Their short time limits exclude any time in which the machine stalls."""
    monkeypatch.setattr(pool, "_LATE_SECONDS", 0.02)
    judges = []

    def start(**section: Any) -> RewardJudge:
        judges.append(load_judge(RewardSection(**section), Texts().decode, max_response_tokens=20))
        return judges[-1]

    yield start
    for judge in judges:
        judge.close()

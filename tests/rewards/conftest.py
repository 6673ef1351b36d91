"""Judges that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlhpc.rewards.reward_workers import FunctionRewards, start_reward_workers
from tests.rewards.scoring import Texts, exclude_stalls, sections


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start judges. Their short time limits exclude any time in which the machine stalls."""
    exclude_stalls(monkeypatch)
    judges = []

    def start(**section: Any) -> FunctionRewards:
        judges.append(start_reward_workers(*sections(**section), Texts().decode, max_response_tokens=20))
        return judges[-1]

    yield start
    for reward_workers in judges:
        reward_workers.close()

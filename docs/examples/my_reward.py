"""A reward of one's own: 1 for the right sum, part of it for an answer whose last digit is right."""

from __future__ import annotations

import re
from typing import Any


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    last_digit: float = 0.0,
) -> float:
    """``last_digit`` comes from ``rewards.0.arguments`` of the config."""
    numbers = re.findall(r"\d+", solution_str)
    if not numbers:
        return 0.0
    if int(numbers[-1]) == int(ground_truth):
        return 1.0
    return last_digit if numbers[-1][-1] == str(ground_truth)[-1] else 0.0

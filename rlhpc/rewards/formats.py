"""Rewards of a response's format and length, to be weighted beside a reward of its correctness."""

from __future__ import annotations

import re
from typing import Any

_THINK_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


def pattern(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], regex: str, score: float = 1.0
) -> float:
    """``score`` if the regular expression matches the whole response, else 0; a dot matches newlines too."""
    return score * bool(re.fullmatch(regex, solution_str, re.DOTALL))


def think_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the response is ``<think>…</think><answer>…</answer>`` with each tag once, ignoring white space."""
    # Counts tags first: with many of them the expression would backtrack.
    return float(len(_TAG.findall(solution_str)) == 4 and bool(_THINK_ANSWER.fullmatch(solution_str)))


def length(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    response_tokens: int,
    max_response_tokens: int,
) -> float:
    """Length of the response from 0 to -1 at the maximum."""
    return -response_tokens / max_response_tokens


def overlong(
    response_tokens: int, max_response_tokens: int, buffer_tokens: int = 4096, penalty: float = 1.0, **_row: Any
) -> float:
    """0, and within ``buffer_tokens`` of the maximum length linearly down to -``penalty`` (DAPO's soft overlong
    punishment, arXiv 2503.14476, equation 13)."""
    _check_overlong(max_response_tokens, buffer_tokens)
    over = response_tokens - (max_response_tokens - buffer_tokens)
    return -penalty * min(max(over / buffer_tokens, 0.0), 1.0)


def _check_overlong(max_response_tokens: int, buffer_tokens: int = 4096, penalty: float = 1.0) -> None:
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(f"buffer_tokens {buffer_tokens} is not between 1 and the {max_response_tokens} of a response")


overlong.check = _check_overlong  # type: ignore[attr-defined]

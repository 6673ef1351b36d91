"""Rules that judge an answer by the ground truth: 1 or 0."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

_VERIFIER_SECONDS = 5
_MOST_DIGITS = 4300


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if math-verify finds the last boxed expression, or else the answer in the text, equal to the ground truth."""
    from math_verify import parse, verify

    limit = _verifier_limit()
    answer = parse(last_boxed(solution_str) or solution_str, parsing_timeout=limit)
    return float(verify(_parse_truth(str(ground_truth), limit), answer, timeout_seconds=limit))


def _import_verifier() -> None:
    import math_verify  # noqa: F401 - takes a second, which is none of a call's time


maths.check = _import_verifier  # type: ignore[attr-defined]


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the response is the ground truth, white space at the ends aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def number(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the last integer in the response is the ground truth."""
    found = re.findall(r"-?\d+", solution_str)
    # Python makes no number of thousands of digits.
    return float(bool(found) and len(found[-1]) < _MOST_DIGITS and int(found[-1]) == int(ground_truth))


def boxed(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    r"""1 if the last ``\boxed{…}`` holds the ground truth, letter by letter, white space aside."""
    answer = last_boxed(solution_str)
    return float(answer is not None and _squeezed(answer[len("\\boxed{") : -1]) == _squeezed(str(ground_truth)))


def last_boxed(text: str) -> str | None:
    r"""The last ``\boxed{…}`` of the text with its braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start : end + 1]
    return None


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@functools.lru_cache(maxsize=4096)
def _parse_truth(ground_truth: str, limit: int | None) -> Any:
    from math_verify import parse

    for text in (ground_truth if "\\boxed{" in ground_truth else f"\\boxed{{{ground_truth}}}", ground_truth):
        parsed = parse(text, parsing_timeout=limit)
        if parsed:
            return parsed
    raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")


def _verifier_limit() -> int | None:
    """math-verify bounds its time with SIGALRM, which only the main thread can take."""
    return _VERIFIER_SECONDS if threading.current_thread() is threading.main_thread() else None

"""Rules that judge an answer by the ground truth: 1 or 0."""

from __future__ import annotations

import functools
import logging
import re
import threading
from typing import Any

_VERIFIER_SECONDS = 5
_MOST_DIGITS = 4300


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if math-verify finds the last boxed expression, or else the answer in the text, equal to the ground truth."""
    from math_verify import verify

    limit = _verifier_limit()
    answer = _parse_answer(solution_str, limit)
    return float(verify(_parse_truth(str(ground_truth), limit), answer, timeout_seconds=limit))


def _import_verifier() -> None:
    import math_verify  # noqa: F401 - takes a second, which is none of a call's time

    # It logs whole responses that take it too long.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def _maths_answer(solution_str: str) -> str:
    """What math-verify reads, as sympy writes it; a decimal number as the fraction that it is."""
    import sympy

    found = _parse_answer(solution_str, _verifier_limit())
    if not found:
        return ""
    return str(sympy.Rational(str(found[0])) if isinstance(found[0], sympy.Float) else found[0])


maths.check = _import_verifier  # type: ignore[attr-defined]
maths.answer = _maths_answer  # type: ignore[attr-defined]


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the response is the ground truth, white space at the ends aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


exact.answer = str.strip  # type: ignore[attr-defined]


def number(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the last integer in the response is the ground truth."""
    found = _last_number(solution_str)
    return float(found is not None and int(found) == int(ground_truth))


def _last_number(solution_str: str) -> str | None:
    """As Python writes it, which makes no number of thousands of digits."""
    found = re.findall(r"-?\d+", solution_str)
    return str(int(found[-1])) if found and len(found[-1]) < _MOST_DIGITS else None


number.answer = _last_number  # type: ignore[attr-defined]


def boxed(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    r"""1 if the last ``\boxed{…}`` holds the ground truth, letter by letter, white space aside."""
    return float(_in_box(solution_str) == _squeezed(str(ground_truth)))


def _in_box(solution_str: str) -> str | None:
    answer = last_boxed(solution_str)
    return None if answer is None else _squeezed(answer[len("\\boxed{") : -1])


boxed.answer = _in_box  # type: ignore[attr-defined]


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


@functools.lru_cache(maxsize=1)  # scored first, then asked for its answer
def _parse_answer(solution_str: str, limit: int | None) -> Any:
    from math_verify import parse

    return parse(last_boxed(solution_str) or solution_str, parsing_timeout=limit)


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

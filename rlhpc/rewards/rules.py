"""Rules that reward workers an answer by the ground truth: 1 or 0."""

from __future__ import annotations

import functools
import logging
import re
from types import ModuleType
from typing import Any

_MOST_DIGITS = 4300
# math-verify reads no more of a response: its expressions take quadratic time and more.
_MOST_CHARACTERS = 4000


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if math-verify finds the last boxed expression, or else the answer at the end of the text, equal to the ground
    truth.

    The caller bounds time and memory: a response can make sympy compute a number that fits nowhere, and no signal
    interrupts that.
    """
    truth = _parse_truth(str(ground_truth))
    return float(_math_verify().verify(truth, _parse_answer(solution_str), timeout_seconds=None))


@functools.cache
def _math_verify() -> ModuleType:
    import math_verify

    # It logs whole responses, and warns that it has no time limit of its own.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


def _warm_up() -> None:
    """Import math-verify and compile its expressions before the first call's time begins."""
    maths("", r"\boxed{\frac{1}{2}}", "2", {})


def _maths_answer(solution_str: str) -> str:
    """What math-verify reads, as sympy writes it; a decimal number as the fraction that it is."""
    found = _parse_answer(solution_str)
    try:
        return _written(found[0]) if found else ""
    except Exception:  # a number of too many digits, say
        return found[-1] if isinstance(found[-1], str) else ""


def _written(expression: Any) -> str:
    """The expression as text; an exception where sympy would have to compute a tower of powers to order its terms."""
    import sympy

    if isinstance(expression, sympy.Float):
        return str(sympy.Rational(str(expression))) if 1e-99 < abs(float(expression)) < 1e99 else str(expression)
    for power in expression.atoms(sympy.Pow) if isinstance(expression, sympy.Basic) else ():
        if not all(inner.exp.is_Rational and abs(inner.exp) <= 1 for inner in power.exp.atoms(sympy.Pow)):
            raise OverflowError("a power in an exponent")
    return str(expression)


maths.check = _warm_up  # type: ignore[attr-defined]
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
def _parse_answer(solution_str: str) -> Any:
    text = last_boxed(solution_str) or solution_str[-_MOST_CHARACTERS:]
    return _math_verify().parse(text, parsing_timeout=None) if len(text) <= _MOST_CHARACTERS else []


@functools.lru_cache(maxsize=4096)
def _parse_truth(ground_truth: str) -> Any:
    for text in (ground_truth if "\\boxed{" in ground_truth else f"\\boxed{{{ground_truth}}}", ground_truth):
        parsed = _math_verify().parse(text, parsing_timeout=None)
        if parsed:
            return parsed
    raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")

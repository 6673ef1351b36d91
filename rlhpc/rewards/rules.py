"""Rewards of 1 or 0 that compare the response's answer with the ground truth."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from types import ModuleType
from typing import Any

_MOST_DIGITS = 4300
# Longest text passed to math-verify, whose expressions take at least quadratic time.
_MOST_CHARACTERS = 4000
# Ground truths that math-verify reads in any case. It takes milliseconds for each, and may hang on powers of numbers.
_PLAIN = re.compile(r"[\w\s\\{}()\[\],.+\-*/=<>|:;%&]{1,200}", re.ASCII)


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if math-verify finds the last boxed expression, or else the answer at the end, equal to the ground truth.

    The caller must limit time and memory: a response can make sympy compute a number of any size, which no signal
    interrupts.
    """
    truth = _parse_truth(str(ground_truth))
    return float(_math_verify().verify(truth, _parse_answer(solution_str), timeout_seconds=None))


@functools.cache
def _math_verify() -> ModuleType:
    import math_verify

    # It would log whole responses, and warn about its missing time limit.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


def _warm_up() -> None:
    """Imports math-verify and compiles its expressions, so that the first call's time limit does not include it."""
    maths("", r"\boxed{\frac{1}{2}}", "2", {})


def _maths_answer(solution_str: str) -> str:
    """The answer that math-verify finds, as sympy's text; a decimal number as a fraction."""
    found = _parse_answer(solution_str)
    try:
        return _written(found[0]) if found else ""
    except Exception:  # for example a number of too many digits
        return found[-1] if isinstance(found[-1], str) else ""


def _written(expression: Any) -> str:
    """The expression as text; raises if sympy would have to compute a tower of powers to order its terms."""
    import sympy

    if isinstance(expression, sympy.Float):
        return str(sympy.Rational(str(expression))) if 1e-99 < abs(float(expression)) < 1e99 else str(expression)
    for power in expression.atoms(sympy.Pow) if isinstance(expression, sympy.Basic) else ():
        if not all(inner.exp.is_Rational and abs(inner.exp) <= 1 for inner in power.exp.atoms(sympy.Pow)):
            raise OverflowError("a power in an exponent")
    return str(expression)


def _check_truth(data_source: str, ground_truth: Any) -> None:
    text = str(ground_truth)
    if not is_plain(text) and not read_truth(text):
        raise ValueError("math-verify cannot read it")


def is_plain(text: str) -> bool:
    """True if math-verify is known to read a ground truth: balanced braces, not only commands, no power of a number."""
    text = re.sub(r"(?<=[A-Za-z])\^(\d|\{\d{1,2}\})(?!\^)", "", text)
    if not _PLAIN.fullmatch(text) or re.search(r"\\boxed|\\[{}]", text):
        return False
    depth = list(itertools.accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in text))
    return min(depth) == depth[-1] == 0 and re.search(r"[A-Za-z0-9]", re.sub(r"\\[A-Za-z]+", "", text)) is not None


def _check_not_blank(data_source: str, ground_truth: Any) -> None:
    """The part of the check that needs no math-verify, which login nodes lack."""
    if not str(ground_truth).strip(" \t\n$"):
        raise ValueError("it is empty")


maths.check = _warm_up  # type: ignore[attr-defined]
maths.check_ground_truth = _check_truth  # type: ignore[attr-defined]
maths.quick_check = _check_not_blank  # type: ignore[attr-defined]
maths.answer = _maths_answer  # type: ignore[attr-defined]


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the response equals the ground truth, ignoring white space at both ends."""
    return float(solution_str.strip() == str(ground_truth).strip())


exact.answer = str.strip  # type: ignore[attr-defined]


def number(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the last integer in the response equals the ground truth."""
    found = _last_number(solution_str)
    return float(found is not None and int(found) == int(ground_truth))


def _last_number(solution_str: str) -> str | None:
    """The last integer, normalized; None without one, or above Python's limit of digits."""
    found = re.findall(r"-?\d+", solution_str)
    return str(int(found[-1])) if found and len(found[-1]) < _MOST_DIGITS else None


def _check_integer(data_source: str, ground_truth: Any) -> None:
    try:
        int(ground_truth)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("it is not an integer") from None


number.check_ground_truth = _check_integer  # type: ignore[attr-defined]
number.quick_check = _check_integer  # type: ignore[attr-defined]
number.answer = _last_number  # type: ignore[attr-defined]


def boxed(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    r"""1 if the content of the last ``\boxed{…}`` equals the ground truth, ignoring white space."""
    return float(_in_box(solution_str) == _squeezed(str(ground_truth)))


def _in_box(solution_str: str) -> str | None:
    answer = last_boxed(solution_str)
    return None if answer is None else _squeezed(answer[len("\\boxed{") : -1])


boxed.answer = _in_box  # type: ignore[attr-defined]


def last_boxed(text: str) -> str | None:
    r"""The last ``\boxed{…}`` of the text, with balanced braces; None without one."""
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


@functools.lru_cache(maxsize=1)  # called once to score, once for the answer
def _parse_answer(solution_str: str) -> Any:
    text = last_boxed(solution_str) or solution_str[-_MOST_CHARACTERS:]
    return _math_verify().parse(text, parsing_timeout=None) if len(text) <= _MOST_CHARACTERS else []


@functools.lru_cache(maxsize=4096)
def _parse_truth(ground_truth: str) -> Any:
    parsed = read_truth(ground_truth)
    if not parsed:
        raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")
    return parsed


def read_truth(ground_truth: str) -> Any:
    """Values that math-verify reads; empty if it cannot."""
    for text in (ground_truth if "\\boxed{" in ground_truth else f"\\boxed{{{ground_truth}}}", ground_truth):
        parsed = _math_verify().parse(text, parsing_timeout=None)
        if parsed:
            return parsed
    return []

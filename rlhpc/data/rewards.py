"""Rewards: the built-in rules, and a user's function behind one checked call.

A reward is a function ``(data_source, solution_str, ground_truth, extra_info, **arguments)`` that returns a number, or
a dict with the key ``score``.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from rlhpc.api import Prompt
from rlhpc.config.schema import RewardSection
from rlhpc.core.errors import UserError
from rlhpc.core.imports import import_attribute

_VERIFIER_SECONDS = 5


def load_reward(section: RewardSection) -> Callable[[Prompt, str], float]:
    """The configured reward as ``score(prompt, response text)``.

    What goes wrong inside the function, and a result that is not a finite number, are UserErrors naming the sample.
    """
    function = import_attribute(section.function, "reward.function")
    if not callable(function):
        raise UserError(f"{section.function!r} is not a function", where="reward.function", remedy="name one")
    _check_signature(function, section)

    def score(prompt: Prompt, response: str) -> float:
        def fail(what: str) -> UserError:
            return UserError(
                f"{what} for prompt {prompt.prompt_id} of {prompt.data_source!r}, response {response[:80]!r}",
                where=f"reward.function {section.function}",
                remedy="make it return a finite number for every response",
            )

        try:
            result = function(
                data_source=prompt.data_source,
                solution_str=response,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
                **section.arguments,
            )
        except Exception as error:  # the user's code may raise anything
            raise fail(f"raised {type(error).__name__}: {error}") from error
        if isinstance(result, dict) and "score" in result:
            result = result["score"]
        if not isinstance(result, numbers.Real | np.bool_):
            raise fail(f"returned {result!r:.80} ({type(result).__name__})")
        if not math.isfinite(result):
            raise fail(f"returned {float(result)}")
        return float(result)

    return score


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if math-verify finds the last boxed expression, or else the answer in the text, equal to the ground truth."""
    from math_verify import parse, verify

    limit = _verifier_limit()
    answer = parse(last_boxed(solution_str) or solution_str, parsing_timeout=limit)
    return float(verify(_parse_truth(str(ground_truth), limit), answer, timeout_seconds=limit))


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the response is the ground truth, white space at the ends aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def number(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the last integer in the response is the ground truth."""
    found = re.findall(r"-?\d+", solution_str)
    return float(bool(found) and int(found[-1]) == int(ground_truth))


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


def _check_signature(function: Callable[..., Any], section: RewardSection) -> None:
    """The function takes what it will be called with."""
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may tell none
        return
    try:
        signature.bind(**dict.fromkeys(names), **section.arguments)
    except TypeError as error:
        raise UserError(
            f"{section.function} cannot be called with {', '.join((*names, *section.arguments))} ({error})",
            where="reward.arguments" if section.arguments else "reward.function",
            remedy="make its parameters and reward.arguments agree",
        ) from None

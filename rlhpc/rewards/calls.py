"""One call of a reward function, its inputs and outcomes, and checks of ground truths before a run.

Free of torch, because worker processes import it. A check is a function's attribute ``check_ground_truth``.
"""

from __future__ import annotations

import errno
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhpc.core.errors import UserError, one_line
from rlhpc.core.imports import import_attribute

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
# Passed to functions that have a parameter of this name.
ON_REQUEST = ("response_tokens", "max_response_tokens")
_SHOWN = 300
_ANSWER = "pred"  # verl's key

FailureKind = Literal["raised", "result", "timeout", "memory", "died"]
# Kinds of calls that ended before the function returned or raised.
UNFINISHED: frozenset[FailureKind] = frozenset({"timeout", "memory", "died"})

LOADER = "rlhpc.rewards.calls:load_check"
Truth = tuple[str, Any]  # the data source, the ground truth


class CallDied(RuntimeError):
    """Raised by a built-in function that lost another process; handled as if the worker had died."""


@dataclass(frozen=True)
class Entry:
    """A configured function: its import path, its arguments and the config key that holds it."""

    path: str
    arguments: dict[str, Any]
    where: str
    loader: str = "rlhpc.rewards.calls:load_function"  # turns the entry into what a worker calls
    max_response_tokens: int | None = None  # passed to a ``check`` with such a parameter
    time_limit_seconds: float | None = None  # per call; None: the pool's
    memory_limit_mib: int | None = None  # per call, in addition to the worker's memory at its beginning
    built_in: bool = False  # a function of this package: it keeps no state, so its worker may be replaced


@dataclass(frozen=True)
class Score:
    """Result of a function; ``parts`` are the other numbers of a returned dict.

    ``answer`` is the response's answer, normalized so that equal answers are equal texts, "" if there is none; None if
    the function does not extract answers.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True)
class Failure:
    """A failed call. ``what`` completes a sentence that begins with the function's name: raised ValueError: …"""

    kind: FailureKind
    what: str


Outcome = Score | Failure


@dataclass(frozen=True)
class Retired:
    """Last message of a worker that exits because its calls have left too much memory allocated."""


def load_function(entry: Entry) -> Callable[[Mapping[str, Any]], Outcome]:
    """Wraps the function into one that takes a dict of all KEYWORDS and ON_REQUEST and never raises.

    Raises a UserError if there is no such function, if its parameters do not match, or if its own ``check`` (called
    with the arguments) fails.
    """
    function = import_attribute(entry.path, entry.where)
    if not callable(function):
        raise UserError(f"{entry.path!r} is not a function", where=entry.where, remedy="name a function")
    answer_of = getattr(function, "answer", None)
    wanted = (*KEYWORDS, *_requested(function, entry))
    _check(function, entry)

    def call(keywords: Mapping[str, Any]) -> Outcome:
        try:
            outcome = outcome_of(function(**{name: keywords[name] for name in wanted}, **entry.arguments))
            if isinstance(outcome, Score) and callable(answer_of):
                return replace(outcome, answer=_text(answer_of(keywords["solution_str"])))
            return outcome
        except BaseException as error:  # the user's code may raise anything, including SystemExit
            return failure_of(error, entry.memory_limit_mib)

    return call


def failure_of(error: BaseException, memory_limit_mib: int | None = None) -> Failure:
    """The failure of a call that raised ``error``; running out of memory is its own kind."""
    if isinstance(error, CallDied):
        return Failure("died", str(error))
    if _is_memory_error(error):
        limit = f" (limit: {memory_limit_mib} MiB)" if memory_limit_mib is not None else ""
        return Failure("memory", f"ran out of memory{limit}")
    return Failure("raised", described(error))


def _is_memory_error(error: BaseException) -> bool:
    """True if memory ran out; PyTorch raises a plain RuntimeError when a CPU allocation fails."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (type(error) is RuntimeError and "DefaultCPUAllocator" in str(error))


def outcome_of(result: Any) -> Outcome:
    """Outcome of a returned value: a finite number, or a dict whose ``score`` is one, with ``pred`` as its answer."""
    score = result["score"] if isinstance(result, dict) and "score" in result else result
    value = _number(score)
    if value is None:
        return Failure("result", f"returned {score!r:.80} ({type(score).__name__})")
    if not math.isfinite(value):
        return Failure("result", f"returned {value}")
    if score is result:
        return Score(value)
    found = {str(key): _number(item) for key, item in result.items() if key not in ("score", _ANSWER)}
    parts = {key: item for key, item in found.items() if item is not None and math.isfinite(item)}
    return Score(value, parts, _text(result[_ANSWER]) if _ANSWER in result else None)


def _text(answer: Any) -> str:
    return "" if answer is None else str(answer)


def _number(value: Any) -> float | None:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # numpy's booleans are not numbers.Real
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:  # an integer too large for a float
        return math.inf


def described(error: BaseException) -> str:
    """The exception in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    try:
        text = str(error)
    except Exception:  # the exception's own __str__ may fail
        text = "(no text)"
    return f"raised {one_line(f'{type(error).__name__}: {text}')[:_SHOWN]}{place}"


def _check(function: Callable[..., Any], entry: Entry) -> None:
    """Calls the function's ``check``, if it has one, with its arguments."""
    check = getattr(function, "check", None)
    if not callable(check):
        return
    known = {"max_response_tokens": entry.max_response_tokens}
    try:
        asked = {name: value for name, value in known.items() if name in inspect.signature(check).parameters}
        check(**asked, **entry.arguments)
    except UserError as error:
        raise UserError(error.message, where=error.where or entry.where, remedy=error.remedy) from None
    except Exception as error:
        raise UserError(
            f"{entry.path} {described(error)}", where=entry.where, remedy="fix its arguments, or it"
        ) from None


def _requested(function: Callable[..., Any], entry: Entry) -> list[str]:
    """Names in ON_REQUEST that the function has parameters for. Raises a UserError if it cannot be called with them."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have no signature
        return []
    requested = [name for name in ON_REQUEST if name in signature.parameters and name not in entry.arguments]
    names = (*KEYWORDS, *requested)
    try:
        signature.bind(**dict.fromkeys(names), **entry.arguments)
    except TypeError as error:
        where = entry.where.replace("function", "arguments") if entry.where == "rewards.0.function" else entry.where
        raise UserError(
            f"{entry.path} cannot be called with {', '.join((*names, *entry.arguments))} ({error})",
            where=where if entry.arguments else entry.where,
            remedy="make its parameters match the configured arguments",
        ) from None
    return requested


def load_check(entry: Entry) -> Callable[[Sequence[Truth]], Outcome]:
    """Wraps the function's check into one of several ground truths, which fails with the first that the function cannot
    use. Without ground truths its score is 1 if the function has a check, else 0."""
    check = getattr(import_attribute(entry.path, entry.where), "check_ground_truth", None)

    def call(truths: Sequence[Truth]) -> Outcome:
        if not callable(check):
            return Score(0.0)
        for source, truth in truths:
            try:
                check(data_source=source, ground_truth=truth, **entry.arguments)
            except ValueError as error:
                return Failure("raised", one_line(str(error)))
            except BaseException as error:  # the user's code may raise anything
                return failure_of(error, entry.memory_limit_mib)
        return Score(1.0)

    return call


def unusable(value: Any, function: str, what: str, place: str) -> UserError:
    """The error on a ground truth that a function cannot use."""
    return UserError(
        f"the ground truth {value!r:.80} is not one for {function}: {what}",
        where=place,
        remedy="correct or remove the row, or set reward_workers.on_failure",
    )

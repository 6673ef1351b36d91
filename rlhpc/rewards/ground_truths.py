"""Checks of ground truths before a run, by a function's attribute ``check_ground_truth``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhpc.core.errors import UserError, one_line
from rlhpc.core.imports import import_attribute
from rlhpc.rewards.calls import Entry, Failure, Outcome, Score, failure_of

LOADER = "rlhpc.rewards.ground_truths:load_check"
Truth = tuple[str, Any]  # the data source, the ground truth


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

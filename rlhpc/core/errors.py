"""Errors a user can mend. Anything else that goes wrong is ours and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USER_ERROR = 2


class UserError(ValueError):
    """Bad input, told in one line: where it is, what is wrong with its value, what to do.

    ``where`` is a config key (``rollout.tp``), a file, a rank or a node; ``remedy`` starts with a verb.
    """

    def __init__(self, message: str, *, where: str = "", remedy: str = "") -> None:
        self.message, self.where, self.remedy = message, where, remedy
        line = f"{where}: {message}" if where else message
        super().__init__(one_line(f"{line}; {remedy}" if remedy else line))

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.message, self.where, self.remedy)


class NodeError(UserError):
    """One machine of the job is at fault, not what was asked of it; another one may do. ``where`` names it."""


class NonFiniteError(RuntimeError):
    """Training produces numbers that are not finite. One line: which model, phase and step, where the batches are, the
    remedy. The fault may be in data, rate, code or a device, so it is no error of the user's input."""


class ReshardError(RuntimeError):
    """Weights did not get from training into an engine as they should. Not the user's fault: it keeps its traceback."""


def _rebuild(kind: type[UserError], message: str, where: str, remedy: str) -> UserError:
    return kind(message, where=where, remedy=remedy)


def one_line(text: str) -> str:
    """The text with every run of white space made one blank."""
    return " ".join(text.split())


def nearest(name: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """The valid names most like ``name``, best first; possibly none."""
    return difflib.get_close_matches(name, list(valid), n=count, cutoff=0.5)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest valid ones, or all of them when none is near."""
    valid = sorted(valid)
    close = nearest(name, valid)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "valid: " + ", ".join(valid)

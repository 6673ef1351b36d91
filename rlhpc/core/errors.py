"""Errors the user can fix, and a few others. Any other error keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rlhpc.core.redaction import redact

EXIT_USER_ERROR, EXIT_DOES_NOT_FIT = 2, 3
SHOWN_ERRORS = 20
_MOST_NAMES = 60  # that a remedy lists
_LONGEST_NAME = 200  # characters that are compared with valid names


class UserError(ValueError):
    """Wrong input, reported in one line: where it is, what is wrong with it, how to fix it.

    ``where``: a config key (``rollout.tp``), a file, a rank or a node; ``remedy`` starts with a verb. Secrets in them
    are replaced.
    """

    def __init__(self, message: str, *, where: str = "", remedy: str = "") -> None:
        message, where, remedy = (_plain(redact(text)) for text in (message, where, remedy))
        self.message, self.where, self.remedy = message, where, remedy
        line = f"{where}: {message}" if where else message
        super().__init__(redact(one_line(f"{line}; {remedy}" if remedy else line)))

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.message, self.where, self.remedy)


class DoesNotFitError(UserError):
    """A planned run that is valid, but too large for its machines."""


class UserErrors(UserError):
    """Several errors in one line, the most important first; those after the twentieth are counted."""

    def __init__(self, errors: Sequence[UserError], more: int = 0) -> None:
        """``more``: the number of errors that are not among them."""
        shown = [str(error) for error in errors[:SHOWN_ERRORS]]
        uncounted = more + len(errors) - len(shown)
        super().__init__(" | ".join([*shown, *([f"and {uncounted} more"] if uncounted else [])]))
        self.errors, self._more = tuple(errors), more

    def __reduce__(self) -> tuple:
        return UserErrors, (self.errors, self._more)


class Faults:
    """Errors of checks that do not depend on each other, in the order of the checks."""

    def __init__(self, errors: Iterable[UserError] = ()) -> None:
        self.errors = list(errors)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that ends at the first error of its block, which is kept."""
        try:
            yield
        except UserErrors as several:
            self.errors += several.errors
        except UserError as error:
            self.errors.append(error)

    def raise_all(self) -> None:
        """Raises what was found, each error once."""
        errors = list({str(error): error for error in self.errors}.values())
        if errors:
            raise errors[0] if len(errors) == 1 else UserErrors(errors)


class NodeError(UserError):
    """Fault of one node; another one may work. ``where`` names it."""


class StoreError(NodeError):
    """A node cannot reach the job's store, on the job's first node."""


class NonFiniteError(RuntimeError):
    """Training produces non-finite numbers. One line: model, phase and step, where the batches are, the remedy. The
    cause may be data, learning rate, code or a device, so it is not a UserError."""


class StrangerError(RuntimeError):
    """Another program keeps taking the place of a rank. One line: its address, our port, the remedy."""


class ReshardError(RuntimeError):
    """A weight sync failed. Not the user's fault: it keeps its traceback."""


class PeerLost(RuntimeError):
    """A rank of another role, with which this one exchanges data, has ended, or does not respond in time."""


def _rebuild(kind: type[UserError], message: str, where: str, remedy: str) -> UserError:
    return kind(message, where=where, remedy=remedy)


def one_line(text: str) -> str:
    """The text with runs of white space replaced by one blank."""
    return " ".join(text.split())


def _plain(text: str) -> str:
    """The text with escapes for what a terminal would obey or cannot show: control characters, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter.isspace() else repr(letter)[1:-1] for letter in text)


def nearest(name: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """Valid names most similar to ``name``, best first; possibly none."""
    return difflib.get_close_matches(name[:_LONGEST_NAME], list(valid), n=count, cutoff=0.5)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Remedy for an unknown name: the nearest valid ones, or all of them if none is near."""
    valid = sorted(set(valid))
    close = nearest(name, valid)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "valid: " + ", ".join(valid[:_MOST_NAMES]) + (" …" if len(valid) > _MOST_NAMES else "")

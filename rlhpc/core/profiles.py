"""Selection of steps, ranks, phases and tools of a profile, and the request for one of a running job.

A selection exists as text, as a file, and as numbers for a collective. `rlhpc profile` writes a request into the run
folder; the first rank reads it at the end of a step and writes an answer. One request at a time: a new one replaces one
that no rank has read.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import NONE, Patience

Phase = Literal["weight_sync", "rollout", "reward_model", "log_probs", "prepare", "update"]
Tool = Literal["torch", "memory", "nsys", "nvtx", "py-spy"]
PHASES: tuple[Phase, ...] = get_args(Phase)
TOOLS: tuple[Tool, ...] = get_args(Tool)
NEEDS_CUDA = ("memory", "nsys", "nvtx")
MOST_RANGES = 16  # of ranks in one request
_WIDTH = 4 + 3 * MOST_RANGES  # numbers of a request
_LARGEST = 10**9
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


@dataclass(frozen=True)
class Range:
    """Every ``stride``-th number from ``first`` to ``last``."""

    first: int
    last: int
    stride: int = 1

    def __contains__(self, number: int) -> bool:
        return self.first <= number <= self.last and (number - self.first) % self.stride == 0

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{self.last}" + (f":{self.stride}" if self.stride > 1 else "")


EVERY = Range(0, _LARGEST)  # rank


@dataclass(frozen=True)
class Selection:
    """One profile: steps ``first`` to ``last`` on some ranks. ``phases``: empty for the whole step."""

    first: int
    last: int
    ranks: tuple[Range, ...] = (Range(0, 0),)
    phases: tuple[str, ...] = ()
    tools: tuple[str, ...] = ("torch",)

    def covers(self, step: int, rank: int) -> bool:
        """True if the rank is profiled in the step."""
        return self.first <= step <= self.last and any(rank in part for part in self.ranks)

    def count(self, world_size: int) -> int:
        """Number of profiled ranks among ``world_size``."""
        return len(
            {rank for part in self.ranks for rank in range(part.first, min(part.last + 1, world_size), part.stride)}
        )

    @property
    def steps(self) -> str:
        """Its steps as text."""
        return str(Range(self.first, self.last))

    def as_numbers(self) -> list[int]:
        """Non-negative integers that ``from_numbers`` reads, always as many."""
        phases = sum(1 << PHASES.index(name) for name in self.phases)
        tools = sum(1 << TOOLS.index(name) for name in self.tools)
        ranks = [number for part in self.ranks for number in (part.first, part.last, part.stride)]
        return [self.first, self.last, phases, tools, *ranks, *NOTHING[4 + len(ranks) :]]

    def as_json(self) -> dict[str, Any]:
        """JSON value that ``from_json`` reads."""
        return {
            "first": self.first,
            "last": self.last,
            "ranks": [str(part) if part != EVERY else "all" for part in self.ranks],
            "phases": list(self.phases),
            "tools": list(self.tools),
        }


NOTHING = [0] * _WIDTH  # numbers of no selection


def from_numbers(numbers: Sequence[int]) -> Selection | None:
    """The selection of ``Selection.as_numbers``; None if there is none."""
    first, last, phases, tools, *ranks = numbers
    if not first:
        return None
    parts = [Range(*ranks[at : at + 3]) for at in range(0, len(ranks), 3) if ranks[at + 2]]
    return Selection(
        first,
        last,
        tuple(parts),
        tuple(name for bit, name in enumerate(PHASES) if phases >> bit & 1),
        tuple(name for bit, name in enumerate(TOOLS) if tools >> bit & 1),
    )


def from_json(value: Any) -> Selection:
    """The selection of ``Selection.as_json``. Raises ValueError for anything else."""
    try:
        found = Selection(
            int(value["first"]),
            int(value["last"]),
            parse_ranges(value["ranks"], "ranks"),
            tuple(known(value["phases"], PHASES, "phases")),
            tuple(known(value["tools"], TOOLS, "tools")),
        )
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"no profile: {error}") from None
    if not 0 < found.first <= found.last < _LARGEST or not found.tools or not 0 < len(found.ranks) <= MOST_RANGES:
        raise ValueError("no profile: steps, ranks or tools are out of bounds")
    return found


def parse_ranges(items: Iterable[int | str], where: str) -> tuple[Range, ...]:
    """Ranges from items such as 3, "40-42", "0-95:8" and "all". Raises UserError."""
    return tuple(_parse(str(item).strip(), where) for item in items)


def known(names: Iterable[str], valid: Sequence[str], where: str) -> list[str]:
    """The names, each once. Raises UserError for one that is not in ``valid``."""
    for name in names:
        if name not in valid:
            raise UserError(f"unknown name {name!r}", where=where, remedy=did_you_mean(name, valid))
    return list(dict.fromkeys(names))


def parse_steps(text: str, where: str = "STEPS") -> tuple[int, int, bool]:
    """First and last step of a request, and whether they count from the running step.

    ``next`` is the step after the running one, ``+2`` the second after it.
    """
    relative = text.startswith("+") or text == "next"
    part = _parse("1" if text == "next" else text.removeprefix("+"), where)
    if part == EVERY or part.stride != 1 or not part.first:
        raise UserError(f"{text!r} names no steps", where=where, remedy="give 40, 40-42, +2 or next")
    return part.first, part.last, relative


def _parse(text: str, where: str) -> Range:
    if text == "all":
        return EVERY
    match = _RANGE.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a number or a range", where=where, remedy="give numbers, 40-42, or 0-95:8")
    first, last, stride = match.groups()
    part = Range(int(first), int(last or first), int(stride or 1))
    if part.last < part.first or not part.stride:
        raise UserError(
            f"invalid range {text}", where=where, remedy="give the smaller number first, and a stride above 0"
        )
    return part


@dataclass(frozen=True)
class ProfileRequest:
    """``relative``: its steps count from the step that runs when it is read."""

    id: str
    selection: Selection
    relative: bool = False

    def at(self, step: int) -> Selection:
        """The selection, if it is read after ``step``."""
        shift = step if self.relative else 0
        return replace(self.selection, first=self.selection.first + shift, last=self.selection.last + shift)


@dataclass(frozen=True)
class ProfileAnswer:
    """Answer to the request ``id``: the steps that will be profiled, or the reason why none will."""

    id: str
    selection: Selection
    refused: str = ""


def new_request(selection: Selection, *, relative: bool) -> ProfileRequest:
    return ProfileRequest(uuid.uuid4().hex, selection, relative)


def write_request(run: RunFolder, request: ProfileRequest) -> None:
    """Writes the request; its folder must exist."""
    record = {"id": request.id, "time": time.time(), "relative": request.relative}
    write_json(run.profile_request, {**record, **request.selection.as_json()})


def read_request(run: RunFolder) -> ProfileRequest | None:
    """The newest request, without waiting for storage; None if there is none or it cannot be read."""
    try:
        record = read_json(run.profile_request, NONE)
        return ProfileRequest(str(record["id"]), from_json(record), record["relative"] is True)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_answer(run: RunFolder, answer: ProfileAnswer, patience: Patience | None = None) -> None:
    """Writes the answer."""
    record = {"id": answer.id, "time": time.time(), "refused": answer.refused}
    write_json(run.profile_answer, {**record, **answer.selection.as_json()}, patience)


def read_answer(run: RunFolder) -> ProfileAnswer | None:
    """The newest answer, without waiting for storage; None if there is none or it cannot be read."""
    try:
        record = read_json(run.profile_answer, NONE)
        return ProfileAnswer(str(record["id"]), from_json(record), str(record["refused"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None

"""Files of JSON lines in a run folder, such as metrics.jsonl, and their records.

A reader skips malformed lines, such as one that a crash cut short, and the last line while it is being written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any, BinaryIO

from rlhpc.core.storage import patiently

Record = dict[str, Any]
PHASES = ("sft", "rl")
Position = tuple[int, int]  # index of the phase, step: orders the steps of a run
_BLOCK = 1 << 16  # bytes
# Metrics of speed, waits, memory, devices and cost begin so: they differ when a step is repeated, all others are equal.
MEASURED = (
    "perf/",
    "memory/",
    "gpu/",
    "cost/",
    "observe/",
    "trainers/",
    "engines/",
    "engine/",
    "judges/",
    "weight_sync/",
    "rollout/queued_",
    # How responses were dealt depends on when tools answered.
    "rollout/waiting_",
    "rollout/moved_",
    "rollout/turns_",
)


def is_step(record: Mapping[str, Any]) -> bool:
    """True if the record names its phase and step."""
    step = record.get("step")
    return record.get("phase") in PHASES and type(step) is int and step >= 0


def position(step: Mapping[str, Any]) -> Position:
    """Position of the record of a step."""
    return PHASES.index(step["phase"]), step["step"]


def repeatable(record: Mapping[str, Any]) -> Record:
    """Fields that are equal in the records of a step that is repeated from a checkpoint."""
    return {name: value for name, value in record.items() if name != "time" and not name.startswith(MEASURED)}


def number(value: object) -> float | None:
    """The value as a float, which may be infinite or NaN; None for anything that is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def newest_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file from its end, in memory for one block and one line; none if it is absent."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        lines = newest_lines(file, file.seek(0, os.SEEK_END))
        next(lines)  # without a newline
        yield from filter(None, map(_parse, lines))


def read_records(path: Path) -> list[Record]:
    """Records of a file; none if it is absent."""
    return patiently(lambda: [*newest_records(path)][::-1], path)


def newest_lines(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yields what is between the last newline and the offset ``end``, then the lines from the last one on."""
    pieces = list[bytes]()
    while end:
        size = min(end, _BLOCK)
        end = file.seek(end - size)
        first, *lines = file.read(size).split(b"\n")
        for line in reversed(lines):
            yield line + b"".join(reversed(pieces))
            pieces.clear()
        pieces.append(first)
    yield b"".join(reversed(pieces))


def _parse(line: bytes) -> Record | None:
    """The line's JSON object; None if it is malformed."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are not UTF-8 and numbers of thousands of digits, too
        return None
    return value if isinstance(value, dict) else None


class LineFollower:
    """Reads the lines that are appended to a file, each once.

    A file is another one, or was cut, if it lacks the last line read before at its place. It is then read from its
    beginning, from the first line that is new.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._end, self._last = path, 0, b""
        self._known = set[int]()  # hashes of lines

    def read(self) -> list[Record]:
        """Records since the last call, at first all. After an OSError the next call reads them."""
        try:  # opened each time, to see what other NFS clients wrote
            with open(self._path, "rb") as file:
                file.seek(self._end - len(self._last))
                known = file.read(len(self._last)) == self._last
                end = file.seek(self._end if known else 0)
                lines = [line for line in file if line.endswith(b"\n")]
        except FileNotFoundError:
            return []
        new = lines if end else dropwhile(lambda line: hash(line) in self._known, lines)
        found = [record for line in new if (record := _parse(line))]
        self._known.update(map(hash, lines))
        self._end, self._last = end + sum(map(len, lines)), [self._last if end else b"", *lines][-1]
        return found


@dataclass(frozen=True)
class MetricsFile:
    """metrics.jsonl, or another file with a record of each step: timeline.jsonl, histograms.jsonl.

    A step that comes again, which a run repeats from its checkpoint, replaces the earlier records from that step on.
    """

    path: Path

    def newest(self) -> Iterator[Record]:
        """Yields the steps from the last one, in the memory of ``newest_records``."""
        later: Position = (len(PHASES), 0)
        for record in filter(is_step, newest_records(self.path)):
            if position(record) < later:
                later = position(record)
                yield record

    def tail(self, most: int | None) -> list[Record]:
        """The last ``most`` steps in their order; reads only this part of the file."""
        return patiently(lambda: [*islice(self.newest(), most)][::-1], self.path)

    def steps(self) -> list[Record]:
        """All steps in their order; none if the file is absent."""
        return self.tail(None)

    def last_step(self) -> tuple[str, int] | None:
        """Phase and number of the last step; None without any."""
        return next(((step["phase"], step["step"]) for step in self.tail(1)), None)

    def follow(self) -> StepFollower:
        """Reader of the steps as they are written."""
        return StepFollower(LineFollower(self.path))


class StepFollower:
    """Reads the steps of a run as they are written."""

    def __init__(self, file: LineFollower) -> None:
        self._file, self._newest = file, (-1, 0)

    def read(self) -> tuple[list[Record], Position | None]:
        """Steps since the last call in their order, at first all; and where steps come again, None if they do not:
        earlier ones from this position on are void. After an OSError the next call reads them."""
        steps, again = list[Record](), None
        for step in filter(is_step, self._file.read()):
            add_step(steps, step)
            if len(steps) == 1 and position(step) <= self._newest:
                again = position(step)
        if steps:
            self._newest = position(steps[-1])
        return steps, again


def add_step(steps: list[Record], step: Record) -> None:
    """Appends a step. One that comes again replaces those from it on."""
    while steps and position(steps[-1]) >= position(step):
        steps.pop()
    steps.append(step)

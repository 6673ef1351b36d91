"""Interface of trackers, the shipped ones and users' own, and the steps of metrics.jsonl that they take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, is_step, number, parse_records
from rlhpc.core.storage import patiently

_NO_METRICS = frozenset({"phase", "step", "total_steps", "time"})
PHASES = ("sft", "rl")
Position = tuple[int, int]  # number of the phase, step


@dataclass(frozen=True)
class MetricsPoint:
    """The metrics of a step, whose names begin with the phase.

    ``place`` is its position on one axis for both phases: RL steps follow the supervised ones. Step 0 of RL, the first
    validation, shares the place of the last supervised step. ``time``: when the step was recorded, in seconds since
    1970.
    """

    phase: str
    step: int
    place: int
    time: float
    metrics: dict[str, float]

    @property
    def position(self) -> Position:
        """Orders the steps of a run."""
        return PHASES.index(self.phase), self.step


class Feed:
    """Reads metrics.jsonl as it grows.

    A resumed run replaces the file by one without the steps to be repeated. The new file is recognized by its inode,
    and read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset, self._sft_steps = (0, 0), 0, 0

    def read(self) -> tuple[list[MetricsPoint], bool]:
        """Points of the lines completed since the last call; whether they are the whole file, which is new."""
        data, replaced = patiently(self._read, self._path)
        if replaced:
            self._sft_steps = 0
        points: dict[Position, MetricsPoint] = {}
        for record in filter(is_step, parse_records(data)):
            point = self._point(record)
            if point is not None:
                points[point.position] = point
        return sorted(points.values(), key=lambda point: point.position), replaced

    def _point(self, record: Record) -> MetricsPoint | None:
        phase, step, at = record["phase"], record["step"], number(record.get("time"))
        if phase not in PHASES or step < 0 or at is None:
            return None
        if phase == "sft":
            self._sft_steps = max(self._sft_steps, step)
        values = ((f"{phase}/{name}", number(value)) for name, value in record.items() if name not in _NO_METRICS)
        metrics = {name: value for name, value in values if value is not None}
        return MetricsPoint(phase, step, step if phase == "sft" else self._sft_steps + step, at, metrics)

    def _read(self) -> tuple[bytes, bool]:
        """Complete lines that were not read before; whether they begin the file."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed below; reopened to see what other NFS clients wrote
        except FileNotFoundError:
            return b"", False
        with file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            replaced = inode != self._inode or status.st_size < self._offset
            offset = 0 if replaced else self._offset
            file.seek(offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._inode, self._offset = inode, offset + len(complete)
        return complete, replaced


def after(points: Sequence[MetricsPoint], newest: Position | None) -> list[MetricsPoint]:
    """The points of later steps than ``newest``."""
    return [point for point in points if newest is None or point.position > newest]


# How the run's last attempt ended; "open": it may go on.
Outcome = Literal["finished", "stopped", "failed", "open"]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows. ``id`` is the same each time the run is resumed, and unique to run and tracker."""

    name: str
    id: str
    folder: RunFolder
    tracker: str


@runtime_checkable
class Tracker(Protocol):
    """Takes the steps of one run. A method that raises is called again later, on a new object."""

    def newest(self) -> Position | None:
        """Phase (0: sft, 1: rl) and step of the newest step that it has; None without any. A step up to it is not
        sent again, also if a resumed run takes it again."""

    def log(self, points: Sequence[MetricsPoint]) -> None:
        """Takes further steps, in order. They are kept when it returns."""

    def attach(self, settings: Mapping[str, str], files: Sequence[Path]) -> None:
        """Takes the keys of the resolved configuration with their values, and files to attach; replaces those of
        earlier calls."""

    def close(self, outcome: Outcome) -> None:
        """Ends the tracker's run, which a later object may open again."""


@runtime_checkable
class Rewriter(Protocol):
    """A tracker that can replace steps. It takes all steps of the run first, and again when some were taken again."""

    def rewrite(self, points: Sequence[MetricsPoint]) -> int:
        """Takes all steps of the run in place of those that it has; returns how many it did not have."""

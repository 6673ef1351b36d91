"""Steps of metrics.jsonl, in the order in which trackers take them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

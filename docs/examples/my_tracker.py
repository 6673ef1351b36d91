"""A tracker of one's own: a table of rewards as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rlhpc.observe.trackers.protocol import MetricsPoint, Outcome, Position, TrackedRun


class Table:
    def __init__(self, run: TrackedRun, metric: str = "rl/reward/mean") -> None:
        self._metric = metric
        self._file: Path = run.folder.trackers.files(f"{run.tracker}.csv")

    def newest(self) -> Position | None:
        """The last step of the table: steps up to it are not sent again."""
        if not self._file.exists():
            return None
        phase, step, *_ = list(csv.reader(self._file.open()))[-1]
        return int(phase), int(step)

    def log(self, points: Sequence[MetricsPoint]) -> None:
        """Adds a row for each step, in one write."""
        rows = [[*point.position, point.time, point.metrics.get(self._metric, "")] for point in points]
        with self._file.open("a", newline="") as file:
            csv.writer(file).writerows(rows)

    def close(self, outcome: Outcome) -> None:
        """Nothing is open between two calls."""

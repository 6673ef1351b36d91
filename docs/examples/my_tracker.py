"""A tracker of one's own: a table of rewards as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence

from rlhpc.observe.trackers.steps import Step, TrackedRun


def table(run: TrackedRun, metric: str = "rl/reward/mean") -> Callable[[Sequence[Step]], None]:
    path = run.folder.trackers.files(f"{run.tracker}.csv")

    def log(steps: Sequence[Step]) -> None:
        """Adds a row for each step, in one write."""
        rows = [[step.phase, step.step, step.time, step.metrics.get(metric, "")] for step in steps]
        with path.open("a", newline="") as file:
            csv.writer(file).writerows(rows)

    return log

"""The one number of a run that a comparison is about, from its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from rlhpc.core.errors import UserError, nearest
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, is_step, number, parse_records
from rlhpc.core.storage import exists, patiently

Goal = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class Objective:
    """``metric``: mean of its last ``last`` values in the RL steps, or with ``best`` the best of all."""

    metric: str
    goal: Goal = "maximize"
    last: int = 1
    best: bool = False

    @property
    def words(self) -> str:
        """What it is, in words."""
        if self.best:
            return f"{self.metric}, its best value"
        return f"{self.metric}, its last value" if self.last == 1 else f"{self.metric}, mean of its last {self.last}"

    def of(self, values: Sequence[float]) -> float:
        """The number of a run with these values of the metric, of which there are enough."""
        if self.best:
            return max(values) if self.goal == "maximize" else min(values)
        return fmean(values[-self.last :])


def curve(records: Sequence[Record], metric: str) -> dict[int, float]:
    """Values of a metric by RL step, without those that are not finite."""
    found = {record["step"]: number(record.get(metric)) for record in records if record["phase"] == "rl"}
    return {step: value for step, value in found.items() if value is not None and math.isfinite(value)}


def read_steps(run: RunFolder) -> list[Record]:
    """The run's records; none if it has not begun."""
    if not exists(run.metrics):
        return []
    return [record for record in parse_records(patiently(run.metrics.read_bytes, run.metrics)) if is_step(record)]


def check_metric(records: Sequence[Record], objective: Objective, run: RunFolder) -> None:
    """Raises UserError if a run has no such metric, or too few values of it."""
    values = curve(records, objective.metric)
    if not values:
        names = {name for record in records if record["phase"] == "rl" for name in record}
        close = nearest(objective.metric, names)
        raise UserError(
            f"{run.path} has no RL step with {objective.metric}",
            where="--metric",
            remedy=f"did you mean {close[0]!r}?" if close else "choose one that docs/metrics.md names",
        )
    if len(values) < objective.last:
        raise UserError(
            f"{objective.last}, but {run.path} has {len(values)} value(s) of {objective.metric}",
            where="--last",
            remedy=f"use {len(values)} or fewer",
        )

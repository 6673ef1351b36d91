"""Metrics of a run for a comparison: its records, and the curve of one metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhpc.config.study import ObjectiveSection
from rlhpc.core.errors import UserError, nearest
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, is_step, number, parse_records
from rlhpc.core.storage import exists, patiently


def curve(records: Sequence[Record], metric: str) -> dict[int, float]:
    """Values of a metric by RL step, without those that are not finite."""
    found = {record["step"]: number(record.get(metric)) for record in records if record["phase"] == "rl"}
    return {step: value for step, value in found.items() if value is not None and math.isfinite(value)}


def read_steps(run: RunFolder) -> list[Record]:
    """The run's records; none if it has not begun."""
    if not exists(run.metrics):
        return []
    return [record for record in parse_records(patiently(run.metrics.read_bytes, run.metrics)) if is_step(record)]


def check_metric(records: Sequence[Record], objective: ObjectiveSection, run: RunFolder) -> None:
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

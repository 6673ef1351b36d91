"""Starts the runs of a comparison that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.submit import make_plan, submit
from rlhpc.launch.studies.sides import Side


def missing(sides: Sequence[Side], seeds: int) -> list[list[RunConfig]]:
    """Of each side the runs with seeds from 0 on that are not there. Raises UserError for a side of runs alone."""
    found = []
    for side in sides:
        absent = [seed for seed in range(seeds) if seed not in side.runs]
        if absent and side.given is None:
            raise UserError(
                f"{seeds}, but {side.name} has no runs with the seeds {', '.join(map(str, absent))}, and no "
                "configuration to start them from",
                where="--seeds",
                remedy="name its YAML file in place of its folder",
            )
        found.append([side.run_of(seed) for seed in absent])
    return found


def submit_missing(absent: Sequence[Sequence[RunConfig]]) -> list[RunEntry]:
    """Submits them, as one job array a side."""
    plans = [make_plan(configs, Path.cwd()) for configs in absent if configs]
    return [run for plan in plans for run in submit(plan)]


def run_missing(absent: Sequence[Sequence[RunConfig]]) -> int:
    """Runs them on this machine, one after another, up to one that fails; returns its exit code."""
    for config in chain.from_iterable(absent):
        if code := run_here(config):
            return code
    return 0

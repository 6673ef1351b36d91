"""Runs of each side of a comparison by their seeds, their objectives, and the start of those that are missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rlhpc.config.load import load_config, load_with_site
from rlhpc.config.schema import RunConfig
from rlhpc.config.study import ObjectiveSection
from rlhpc.core import attempts
from rlhpc.core.errors import UserError, nearest
from rlhpc.core.files import names_in
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import MetricsFile, Record, number
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.launch.runs.submit import make_plan, submit


@dataclass(frozen=True)
class Side:
    """A configuration with its runs. ``given``: the configuration itself, None if only runs were named."""

    name: str
    runs: Mapping[int, RunFolder]
    config: RunConfig
    given: RunConfig | None = None

    def run_of(self, seed: int) -> RunConfig:
        """Configuration of the run with a seed, in the run folder of that seed."""
        assert self.given is not None, "only a configuration has runs that are missing"
        folder = self.given.folder.with_name(f"{self.given.folder.name}-seed-{seed}")
        return self.given.model_copy(update={"seed": seed, "run_dir": folder, "name": f"{self.name}-seed-{seed}"})


def find_side(text: str) -> Side:
    """The side that an argument of the command names: a configuration, whose runs are beside its run folder
    (NAME-seed-3), a folder of runs, or one run."""
    path = Path(text)
    if path.is_file():
        given = load_with_site(path, ()).config
        return Side(given.name, _runs([*_beside(given)]), given, given)
    found = [path] if (path / "config.yaml").is_file() else [path / name for name in names_in(path)]
    runs = _runs([RunFolder(one) for one in found if (one / "config.yaml").is_file()])
    if not runs:
        raise UserError(
            "is neither a configuration nor a folder with runs", where=text, remedy="name a YAML file or a folder"
        )
    return Side(path.resolve().name, runs, load_config(next(iter(runs.values())).config))


def is_finished(run: RunFolder) -> bool:
    """True if the run has taken all of its steps."""
    verdicts = [attempts.read_verdict(folder) for folder in attempts.folders(run)]
    return bool(verdicts) and verdicts[-1] is not None and verdicts[-1].cause == "finished"


def curve(steps: Sequence[Record], metric: str) -> dict[int, float]:
    """Values of a metric by RL step, without those that are not finite."""
    found = {step["step"]: number(step.get(metric)) for step in steps if step["phase"] == "rl"}
    return {step: value for step, value in found.items() if value is not None and math.isfinite(value)}


def objective_of(run: RunFolder, objective: ObjectiveSection) -> float:
    """Objective of a run. Raises UserError if it has no such metric, or too few values of it."""
    steps = MetricsFile(run.metrics).steps()
    values = [*curve(steps, objective.metric).values()]
    if not values:
        close = nearest(objective.metric, {name for step in steps if step["phase"] == "rl" for name in step})
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
    return objective.of(values)


def value_of(dump: Any, key: str) -> Any:
    """A value of a configuration, as dumped to JSON, by its key; None where a section above it is not there."""
    for name in key.split("."):
        if not isinstance(dump, dict):
            return None
        dump = dump.get(name)
    return dump


def _beside(config: RunConfig) -> list[RunFolder]:
    """Run folders of the configuration's seeds that are there."""
    names = names_in(config.folder.parent, f"{config.folder.name}-seed-*")
    found = [config.folder.parent / name for name in names]
    return [RunFolder(path) for path in found if (path / "config.yaml").is_file()]


def _runs(folders: Sequence[RunFolder]) -> dict[int, RunFolder]:
    """Runs by their seeds, ascending."""
    found: dict[int, RunFolder] = {}
    for folder in folders:
        seed = load_config(folder.config).seed
        if seed in found:
            raise UserError(
                f"{seed} is that of {found[seed].path} too, and counts once",
                where=f"seed of {folder.path}",
                remedy="name a folder whose runs have different seeds",
            )
        found[seed] = folder
    return dict(sorted(found.items()))


def missing(sides: Sequence[Side], seeds: int) -> list[list[RunConfig]]:
    """Missing runs of each side, with seeds from 0 on. Raises UserError for a side of runs alone."""
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
    """Submits missing runs, as one job array a side."""
    plans = [make_plan(configs, Path.cwd()) for configs in absent if configs]
    return [run for plan in plans for run in submit(plan)]


def run_missing(absent: Sequence[Sequence[RunConfig]]) -> int:
    """Runs missing runs on this machine, one after another, up to one that fails; returns its exit code."""
    for config in chain.from_iterable(absent):
        if code := run_here(config):
            return code
    return 0

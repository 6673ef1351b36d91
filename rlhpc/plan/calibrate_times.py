"""Fits what is assumed of a run outside of its steps to what a run measured: start, reading, saving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rlhpc.core.attempts import AttemptTimes, folders, read_times
from rlhpc.core.folder import RunFolder
from rlhpc.plan.estimates.run_time import RunTime
from rlhpc.plan.scenario import Scenario

_SLOWEST, _FASTEST = 1e-6, 1e9  # GB/s that the section takes


@dataclass(frozen=True)
class OutsideSteps:
    """Seconds by name: measured, and predicted before and after the fit. ``planning`` and ``disk``: the fitted keys of
    these sections."""

    measured: Mapping[str, float]
    before: Mapping[str, float]
    after: Mapping[str, float]
    planning: Mapping[str, float]
    disk: Mapping[str, float]


def read_attempts(folder: Path) -> list[AttemptTimes]:
    """Returns the times of those attempts of a run that measured them."""
    found = map(read_times, folders(RunFolder(folder)))
    return [times for times in found if times is not None]


def calibrate_times(case: Scenario, attempts: Sequence[AttemptTimes]) -> OutsideSteps:
    """Returns the start and the bandwidths at which predictions equal the medians over attempts and checkpoints."""
    step, measured = case.step(), _medians(attempts)
    run = case.run(step)
    before = _predicted(case, run)
    planning: dict[str, float] = {}
    disk: dict[str, float] = {}
    if "start" in measured:
        planning["start_seconds"] = _rounded(measured["start"])
    sizes = {"models": run.read_bytes, "resume": run.resume * run.read_rate}
    moved = sum(size for name, size in sizes.items() if name in measured)
    seconds = sum(measured.get(name, 0.0) for name in sizes)
    if moved and seconds:
        disk |= _bandwidths("read", moved / seconds, case)
    written = measured.get("save", 0.0) - (run.write - run.saved_bytes / run.write_rate)  # without copies to the CPU
    if written > 0:
        disk |= _bandwidths("write", run.saved_bytes / written, case)
    fitted = replace(
        case,
        config=case.config.model_copy(update={"planning": case.config.planning.model_copy(update=planning)}),
        disk=case.disk.model_copy(update=disk),
    )
    return OutsideSteps(measured, before, _predicted(fitted, fitted.run(step)), planning, disk)


def _medians(attempts: Sequence[AttemptTimes]) -> dict[str, float]:
    """Returns medians of what was measured at least once."""
    found = {
        "start": [times.start for times in attempts],
        "models": [times.models for times in attempts],
        "resume": [times.resume for times in attempts if times.resume is not None],
        "save": [seconds for times in attempts for seconds in times.saves],
    }
    return {name: median(values) for name, values in found.items() if values}


def _predicted(case: Scenario, run: RunTime) -> dict[str, float]:
    return {
        "start": case.config.planning.start_seconds,
        "models": run.read_bytes / run.read_rate,
        "resume": run.resume,
        "save": run.write,
    }


def _bandwidths(kind: str, rate: float, case: Scenario) -> dict[str, float]:
    """Returns the keys of ``disk`` with which all nodes together reach ``rate`` bytes/s: the one that limits the run
    now, and the other if it would then."""
    nodes = max(1, case.layout.world_size // case.config.resources.ranks_per_node)
    wanted = {f"node_{kind}_gbps": rate / 1e9 / nodes, f"{kind}_gbps": rate / 1e9}
    limits = {name: getattr(case.disk, name) * count for name, count in zip(wanted, (nodes, 1), strict=True)}
    binding = min(limits, key=lambda name: limits[name])
    return {
        name: min(_FASTEST, max(_SLOWEST, _rounded(value)))
        for name, value in wanted.items()
        if name == binding or limits[name] < rate / 1e9
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

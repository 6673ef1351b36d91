"""Compares a run's phases with their prediction, and fits the times outside of steps to what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.attempts import AttemptTimes, folders, read_times
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import MetricsFile
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.roofline import PHASES
from rlhpc.plan.estimates.run_time import RunTime
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.plan.scenario import Scenario
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.placement import engine_ranks

# Required for the step's time and lengths.
_NEEDED = (
    "perf/update_seconds",
    "perf/step_seconds",
    "perf/tokens_per_second",
    "response/length_mean",
    "rollout/completion_tokens",
)
# Passes without gradients that a run does not make are as far from their prediction as these.
_LIKE: Mapping[str, str] = {"log_probs": "update", "reward_model": "log_probs"}
_SMALLEST, _LARGEST = 1e-6, 1e9  # that the keys take


@dataclass(frozen=True)
class Measured:
    """Medians over a run's steps, without the first one if there are others."""

    seconds: Mapping[str, float]  # by the keys of PHASES
    prompt_tokens: float
    response_tokens: float
    steps: int

    @property
    def lengths(self) -> dict[str, int]:
        """Mean lengths by their keys in the section ``planning``."""
        found = {"prompt_tokens": self.prompt_tokens, "response_tokens": self.response_tokens}
        return {name: max(1, round(tokens)) for name, tokens in found.items()}


@dataclass(frozen=True)
class Calibration:
    """``phases``: of the section ``efficiency``, those that were measured."""

    measured: Measured
    phases: Mapping[str, float]
    before: Mapping[str, float]  # predicted seconds without them, by the keys of PHASES
    after: Mapping[str, float]


def read_run(folder: Path) -> Measured:
    """Reads metrics.jsonl of a run folder. Raises UserError without an RL step."""
    path = RunFolder(folder).metrics
    found = (step for step in MetricsFile(path).steps() if step["phase"] == "rl")
    steps = [step for step in found if all(_is_positive(step.get(key)) for key in _NEEDED)]
    if not steps:
        raise UserError("no finished RL step", where=str(path), remedy="name the folder of a run with RL steps")
    steps = steps[1:] or steps
    seconds = {
        name: median(record[key] for record in steps)
        for name in PHASES
        if all(_is_positive(record.get(key := f"perf/{name}_seconds")) for record in steps)
    }
    response = fmean(map(_response_length, steps))
    return Measured(seconds, fmean(map(_prompt_length, steps)), response, len(steps))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def calibrate(
    config: RunConfig,
    shape: ModelDescription,
    layout: ParallelLayout,
    gpu: Gpu,
    efficiency: EfficiencySection,
    measured: Measured,
) -> Calibration:
    """Returns the efficiency at which predicted phases take the measured time.

    With placement separate the weight sync and the rollout stay: trainers measure only what they wait for.
    """
    config = config.model_copy(update={"planning": config.planning.model_copy(update=measured.lengths)})
    before = phase_seconds(predict_step(config, shape, layout, gpu, efficiency))
    alone = ("weight_sync", "rollout") if engine_ranks(config) is not None else ()
    ratios = {
        name: seconds / before[name]
        for name, seconds in measured.seconds.items()
        if name not in alone and before[name] > 0
    }
    for name, other in _LIKE.items():
        ratios.setdefault(name, ratios[other])
    changed = {name: _bounded(getattr(efficiency.phases, name) * ratio) for name, ratio in ratios.items()}
    found = efficiency.model_copy(update={"phases": efficiency.phases.model_copy(update=changed)})
    return Calibration(measured, changed, before, phase_seconds(predict_step(config, shape, layout, gpu, found)))


def phase_seconds(step: StepTime) -> dict[str, float]:
    """Returns a predicted step's seconds by the names in metrics.jsonl, which are the trainers': with placement
    separate, those of staging weights and of waiting for responses."""
    found = {name: sum(step.phase(phase).seconds for phase in phases) for name, phases in PHASES.items()}
    if step.sides is None or step.sync is None:
        return found
    return {**found, "weight_sync": step.sync.stage, "rollout": step.seconds - step.sides.trainers}


def _response_length(record: Mapping[str, float]) -> float:
    """Returns the step's mean response length over all turns and tool answers, as the plan counts it."""
    tools = record.get("tools/answer_tokens_mean")
    return record["response/length_mean"] + (tools if tools is not None and _is_positive(tools) else 0.0)


def _prompt_length(record: Mapping[str, float]) -> float:
    """Returns the step's mean prompt length, from tokens per second and response tokens."""
    samples = record["rollout/completion_tokens"] / record["response/length_mean"]
    return record["perf/tokens_per_second"] * record["perf/step_seconds"] / samples - _response_length(record)


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
    return {name: _bounded(value) for name, value in wanted.items() if name == binding or limits[name] < rate / 1e9}


def _bounded(value: float) -> float:
    return min(_LARGEST, max(_SMALLEST, _rounded(value)))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

"""What a finished run reached of its machine's figures, from the seconds of its phases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.models import ModelShape
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.sharding.layout import ParallelLayout

# Of metrics.jsonl, the phases whose seconds each of them has.
PHASES: Mapping[str, tuple[str, ...]] = {
    "weight_sync": ("weight sync",),
    "rollout": ("rollout",),
    "reward_model": ("reward model",),
    "log_probs": ("log-probs", "reference", "values"),
    "update": ("update", "critic update"),
}
# Without them a record tells neither the step's time nor its lengths.
_NEEDED = (
    "perf/update_seconds",
    "perf/step_seconds",
    "perf/tokens_per_second",
    "response/length_mean",
    "rollout/completion_tokens",
)
_BISECTIONS, _ROUNDS = 26, 3
_LEAST = 1e-7
_Change = Callable[[EfficiencySection, float], EfficiencySection]  # the same, so many times as fast


@dataclass(frozen=True)
class Measured:
    """Medians over a run's steps, its first one left out where it has others."""

    seconds: Mapping[str, float]  # by the keys of PHASES
    prompt_tokens: float
    response_tokens: float
    steps: int

    @property
    def lengths(self) -> dict[str, int]:
        """Keys of the section that say them."""
        found = {"prompt_tokens": self.prompt_tokens, "response_tokens": self.response_tokens}
        return {name: max(1, round(tokens)) for name, tokens in found.items()}


@dataclass(frozen=True)
class Calibration:
    """``changed`` are the keys of the section that were fitted."""

    measured: Measured
    efficiency: EfficiencySection
    changed: Mapping[str, float]
    before: Mapping[str, float]  # seconds predicted with what was known before, by the keys of PHASES
    after: Mapping[str, float]


def read_run(folder: Path) -> Measured:
    """From metrics.jsonl of a run folder; a UserError when it has no RL step."""
    path = RunFolder(folder).metrics
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path), remedy="name a run folder") from None
    steps = list(_whole_steps(lines))
    if not steps:
        raise UserError("no finished RL step", where=str(path), remedy="name the folder of a run with RL steps")
    steps = steps[1:] or steps
    seconds = {
        name: median(record[key] for record in steps)
        for name in PHASES
        if all(_is_positive(record.get(key := f"perf/{name}_seconds")) for record in steps)
    }
    response = fmean(record["response/length_mean"] for record in steps)
    return Measured(seconds, fmean(map(_prompt_length, steps)), response, len(steps))


def _whole_steps(lines: Sequence[str]) -> Iterator[Mapping[str, float]]:
    """Records of RL steps that updated; not a last line that a crash has cut short."""
    for line in lines:
        with suppress(ValueError):
            record = json.loads(line)
            if (
                isinstance(record, dict)
                and record.get("phase") == "rl"
                and all(_is_positive(record.get(key)) for key in _NEEDED)
            ):
                yield record


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def calibrate(
    config: RunConfig,
    shape: ModelShape,
    layout: ParallelLayout,
    gpu: Gpu,
    efficiency: EfficiencySection,
    measured: Measured,
) -> Calibration:
    """The efficiency with which the run's phases take what they took, as near as the bounds of each key allow.

    The share of matrix products and the pace of kernels in training, alike, are fitted to updates, and those of passes
    without gradient to these, where they were measured; that of memory and the pace of kernels in decoding, alike, to
    the rollout; weight_sync to the weight sync.
    """
    config = config.model_copy(update={"planning": config.planning.model_copy(update=measured.lengths)})

    def predicted(changed: EfficiencySection) -> StepTime:
        return predict_step(config, shape, layout, gpu, changed)

    def seconds(names: Sequence[str], tried: EfficiencySection) -> float:
        return sum(phase_seconds(predicted(tried))[name] for name in names)

    found = efficiency
    passes = [name for name in ("reward_model", "log_probs") if name in measured.seconds]
    fits: list[tuple[list[str], _Change]] = [
        (["update"], _compute),
        (passes, _passing),
        (["rollout"], _decoding),
        (["weight_sync"], _weight_sync),
    ]
    for _ in range(_ROUNDS):  # each changes a little of what the others are fitted to
        for names, change in fits:
            if names and all(name in measured.seconds for name in names):
                goal = sum(measured.seconds[name] for name in names)
                found = _fitted(found, change, partial(seconds, names), goal)
    changed = {
        name: float(f"{value:.4g}")
        for name, value in found.model_dump(exclude_none=True).items()
        if value != getattr(efficiency, name)
    }
    found = efficiency.model_copy(update=changed)
    return Calibration(measured, found, changed, phase_seconds(predicted(efficiency)), phase_seconds(predicted(found)))


def _fitted(
    base: EfficiencySection, change: _Change, seconds: Callable[[EfficiencySection], float], goal: float
) -> EfficiencySection:
    factor = _fit(lambda factor: seconds(change(base, factor)), goal)
    return base if factor == 1.0 else change(base, factor)


def phase_seconds(step: StepTime) -> dict[str, float]:
    """A predicted step by the names that metrics.jsonl has for its phases."""
    return {name: sum(step.phase(phase).seconds for phase in phases) for name, phases in PHASES.items()}


def _compute(base: EfficiencySection, factor: float) -> EfficiencySection:
    return _scaled(base, factor, ("compute",), ("launch_us",))


def _passing(base: EfficiencySection, factor: float) -> EfficiencySection:
    own = {"forward_compute": base.compute, "forward_launch_us": base.launch_us}
    start = base.model_copy(update={name: value for name, value in own.items() if getattr(base, name) is None})
    return _scaled(start, factor, ("forward_compute",), ("forward_launch_us",))


def _decoding(base: EfficiencySection, factor: float) -> EfficiencySection:
    return _scaled(base, factor, ("decode",), ("kernel_us", "graph_us"))


def _weight_sync(base: EfficiencySection, factor: float) -> EfficiencySection:
    return _scaled(base, factor, ("weight_sync",), ())


def _scaled(base: EfficiencySection, factor: float, shares: Sequence[str], times: Sequence[str]) -> EfficiencySection:
    """``factor`` times as fast, as far as shares can be: they are 1 at most."""
    update = {name: min(1.0, max(_LEAST, getattr(base, name) * factor)) for name in shares}
    return base.model_copy(update=update | {name: getattr(base, name) / factor for name in times})


def _fit(seconds: Callable[[float], float], goal: float) -> float:
    """The factor at which falling ``seconds`` come nearest to the goal; 1 where they do not depend on it."""
    low, high = log(1e-6), log(1e3)
    slowest, fastest = seconds(exp(low)), seconds(exp(high))
    if slowest - fastest < 1e-3 * goal:
        return 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(exp(middle)) > goal else (low, middle)
    return exp(high)


def _prompt_length(record: Mapping[str, float]) -> float:
    """Mean of the step's samples, from what it counts: all tokens by their speed, and those of the responses."""
    response = record["response/length_mean"]
    samples = record["rollout/completion_tokens"] / response
    return record["perf/tokens_per_second"] * record["perf/step_seconds"] / samples - response

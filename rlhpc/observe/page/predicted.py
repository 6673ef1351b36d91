"""What `rlhpc plan` predicts of a run, beside what the run measured."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.observe.page.curves import Steps

Row = list[Any]  # name, unit, predicted, measured


def predicted_rows(config: RunConfig, run: RunFolder, steps: Steps, attempt: Attempt | None) -> tuple[list[Row], str]:
    """Rows for the page, and why there are none if so."""
    if not config.train.steps:
        return [], "rlhpc plan predicts RL steps, and this run has none."
    from rlhpc.plan.scenario import make_scenario  # most runs on this machine name no GPU

    try:
        case = make_scenario(config)
        if case is None:
            return [], "No GPU is named: set planning.gpu, such as h200, for a prediction."
        rows = [*_steps(case, steps), *_outside(case, run), *_memory(case, steps)]
    except (UserError, OSError, ValueError) as error:  # the model's config.json may be on another machine
        return [], f"No prediction: {error}"
    nodes = f"{case.config.world_size} ranks" + (f"; the last attempt had {attempt.world_size}" if attempt else "")
    return rows, f"Predicted for {case.gpu.name}, {nodes}. Measured: medians over the run, lengths as means."


def _steps(case: Any, steps: Steps) -> Iterator[Row]:
    from rlhpc.plan.calibrate import phase_seconds

    step = case.step()
    work = step.work
    yield ["response length", "tokens", work.response, _mean(steps.column("response/length_mean"))]
    if not step.engine_fits:
        return
    yield ["step", "s", step.seconds, _median(steps.column("perf/step_seconds"))]
    for name, seconds in phase_seconds(step).items():
        measured = _median(steps.column(f"perf/{name}_seconds"))
        if seconds or measured:
            yield [name.replace("_", " "), "s", seconds, measured]
    if step.sides is not None:
        yield ["trainers idle", "", step.sides.idle_trainers, _median(steps.column("trainers/idle_fraction"))]
        yield ["engines idle", "", step.sides.idle_engines, _median(steps.column("engines/idle_fraction_mean"))]
    yield ["throughput", "tokens/s", step.tokens_per_second, _median(steps.column("perf/tokens_per_second"))]
    yield ["MFU", "", step.mfu, _median(steps.column("perf/mfu"))]


def _outside(case: Any, run: RunFolder) -> Iterator[Row]:
    from rlhpc.plan.calibrate_times import calibrate_times, read_attempts

    found = calibrate_times(case, read_attempts(run.path))
    names = {"start": "start", "models": "reading models", "resume": "reading the checkpoint", "save": "checkpoint"}
    for name, title in names.items():
        yield [title, "s", found.before[name], found.measured.get(name)]


def _memory(case: Any, steps: Steps) -> Iterator[Row]:
    from rlhpc.plan.estimates.memory import predict_memory

    plan = predict_memory(case.config, case.shape, case.layout, case.gpu.memory_gib, case.gpu.reserves)
    names = ("memory/device_gib_max", "memory/device_peak_reserved_gib_max")
    measured = max((value for name in names for value in steps.column(name)), default=None)
    yield ["GPU memory, peak", "GiB", plan.peak / 2**30, measured]


def _median(values: list[float]) -> float | None:
    """Without the first value, which includes compilation, if there are others."""
    return median(values[1:] or values) if values else None


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None

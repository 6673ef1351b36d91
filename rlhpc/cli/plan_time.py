"""What ``rlhpc plan`` says of time: a step, the best layouts, a sweep, a calibration. Imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config import yaml12
from rlhpc.config.planning import EfficiencySection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.calibrate import Calibration, calibrate, read_run
from rlhpc.plan.check import check_layout
from rlhpc.plan.hardware import Gpu, named_gpu, read_site
from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.machine import LIMITS
from rlhpc.plan.search import Found, search
from rlhpc.plan.step_time import StepTime, predict_step
from rlhpc.plan.sweep import Point, parse_range, plot, sweep


@dataclass(frozen=True)
class Case:
    """A configuration with all that its time is foretold from."""

    config: RunConfig
    shape: ModelShape
    layout: ParallelLayout
    gpu: Gpu
    efficiency: EfficiencySection


def case_of(config: RunConfig, gpu: str | None) -> Case | None:
    """None when no GPU is named."""
    site = read_site(config)
    found = named_gpu(config, site, gpu)
    if found is None:
        return None
    shape = read_model(config.model.path, config.model.family)
    layout = check_layout(config, config.slurm.most_nodes, shape)
    return Case(config, shape, layout, found, site.efficiency)


def needed_case(config: RunConfig, gpu: str | None, where: str) -> Case:
    """A UserError when no GPU is named."""
    case = case_of(config, gpu)
    if case is None:
        raise UserError("which GPU?", where=where, remedy="name one with --gpu or in planning.gpu, such as h200")
    return case


def step_of(case: Case) -> StepTime:
    return predict_step(case.config, case.shape, case.layout, case.gpu, case.efficiency)


def step_lines(case: Case, step: StepTime) -> list[str]:
    """A line of the whole and a table of the phases."""
    work = step.work
    if not step.engine_fits:
        cut = "the engines' weights leave no room in memory for one response: raise rollout.tp or gpu_memory_fraction"
        return [f"time      of a step cannot be told: {cut}"]
    head = (
        f"time      {_seconds(step.seconds)} a step on {step.ranks} x {case.gpu.name}, "
        f"{step.tokens_per_second:,.0f} tokens/s, MFU of updates {step.mfu:.2f}; most of it {LIMITS[step.limit]}"
    )
    assumed = (
        f"          for {work.samples:,} samples of {work.prompt:,.0f} + {work.response:,.0f} tokens "
        f"(planning.prompt_tokens, planning.response_tokens), {work.updates} update(s)"
    )
    rows = [["phase", "time", "share", "PFLOP", "GB sent", "most of it"]]
    for phase in step.phases:
        pflop = f"{phase.flops / 1e15:,.1f}" if phase.flops else ""
        sent = f"{phase.sent / 1e9:,.1f}" if phase.sent else ""
        share = f"{step.share(phase.name):.0%}"
        rows.append([phase.name, _seconds(phase.seconds), share, pflop, sent, LIMITS[phase.limit]])
    return [head, assumed, "", *_table(rows, last=True)]


def step_json(step: StepTime) -> dict[str, Any]:
    """The same for programs, in seconds and bytes."""
    phases = {
        phase.name: {
            "seconds": phase.seconds,
            "limit": phase.limit,
            "parts": dict(phase.parts),
            "flops": phase.flops,
            "bytes_sent": phase.sent,
            **{name.replace(" ", "_"): value for name, value in phase.notes.items()},
        }
        for phase in step.phases
    }
    return {
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "limit": step.limit,
        "engine_fits": step.engine_fits,
        "phases": phases,
    }


def found_in(case: Case) -> Found:
    """The best layouts; a UserError when none fits."""
    found = search(case.config, case.shape, case.layout.world_size, case.gpu, case.efficiency)
    if not found.best:
        raise UserError(
            f"none of {found.layouts:,} layouts fits into {case.gpu.memory_gib:g} GiB",
            where="--search",
            remedy="use more or larger GPUs, or shorter sequences",
        )
    return found


def search_lines(case: Case, found: Found) -> list[str]:
    """The best layouts as YAML; what is said of each is a comment."""
    asked = step_of(case)
    told = f"# {found.layouts:,} layouts suit; of {found.timed:,} ways to run them the time was foretold"
    lines = [told, f"# as configured: {_seconds(asked.seconds)} a step, {case.layout.text}"]
    for number, best in enumerate(found.best, 1):
        memory = f"{best.memory.peak / 2**30:,.1f} GiB of {case.gpu.memory_gib:g}"
        more = [phase for phase in best.memory.phases if phase.total > case.gpu.memory_bytes]
        lines += [
            "---",
            f"# {number}: {_seconds(best.step.seconds)} a step, {memory}, {best.layout.text}",
            *(f"# {phase.name.upper()} DOES NOT FIT: {phase.total / 2**30:,.1f} GiB" for phase in more),
            *yaml12.dump(best.fragment).splitlines(),
        ]
    return lines


def search_json(found: Found) -> list[dict[str, Any]]:
    return [
        {"seconds": best.step.seconds, "peak_bytes": best.memory.peak, "layout": best.layout.text, **best.fragment}
        for best in found.best
    ]


def sweep_lines(case: Case, text: str, file: Path) -> list[str]:
    """A row for each number of GPUs; the plot is written to ``file``."""
    points = sweep(case.config, case.shape, case.gpu, case.efficiency, *parse_range(text))
    plot(points, file, f"{case.config.name} on {case.gpu.name}")
    rows = [["GPUs", "dp", "step", "rollout", "update", "tokens/s", "scaling", "MFU", "push GB", "sent GB", "GiB"]]
    rows += [_sweep_row(point, points[0]) for point in points]
    return [*_table(rows), "", f"Plot: {file}"]


def calibrate_lines(case: Case, run: Path) -> list[str]:
    """YAML of what was fitted, and in comments what is foretold with it."""
    found = calibrate(case.config, case.shape, case.layout, case.gpu, case.efficiency, read_run(run))
    return [*(f"# {line}".rstrip() for line in _calibration(found)), *yaml12.dump(_fitted(found)).splitlines()]


def _fitted(found: Calibration) -> dict[str, Any]:
    return {"planning": {"efficiency": dict(found.changed)}}


def _calibration(found: Calibration) -> list[str]:
    measured = found.measured
    lengths = f"{measured.prompt_tokens:,.0f} + {measured.response_tokens:,.0f} tokens"
    rows = [["phase", "measured", "before", "with this"]]
    for name, seconds in measured.seconds.items():
        rows.append([name, *map(_seconds, (seconds, found.before[name], found.after[name]))])
    return [f"fitted to {measured.steps} step(s) of samples of {lengths}", *_table(rows)]


def _sweep_row(point: Point, first: Point) -> list[str]:
    step = point.step
    scaling = step.tokens_per_second / first.step.tokens_per_second / (point.ranks / first.ranks)
    return [
        f"{point.ranks:,}",
        str(point.layout.dp),
        _seconds(step.seconds),
        _seconds(step.phase("rollout").seconds),
        _seconds(step.phase("update").seconds),
        f"{step.tokens_per_second:,.0f}",
        f"{scaling:.0%}",
        f"{step.mfu:.2f}",
        f"{point.received / 1e9:,.1f}",
        f"{point.sent / 1e9:,.0f}",
        f"{point.memory.peak / 2**30:,.1f}",
    ]


def _table(rows: Sequence[Sequence[str]], last: bool = False) -> list[str]:
    """Columns to the right, the first one and, with ``last``, the last one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, len(widths) - 1} if last else {0}
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"

"""Predicts a step's time, traffic and memory over numbers of GPUs, with a fixed layout of each model copy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd, lcm
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.memory import MemoryPlan, predict_memory
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.plan.remedies import changed_config
from rlhpc.plan.shortages import Shortage, shortages
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.placement import engine_ranks, judge_ranks, training_ranks

_POINTS = 8
_WHERE = "--gpus"


@dataclass(frozen=True)
class Point:
    """The run on ``ranks`` GPUs."""

    ranks: int
    layout: ParallelLayout
    step: StepTime
    memory: MemoryPlan
    lacks: tuple[Shortage, ...] = ()  # why it cannot run

    @property
    def received(self) -> float:
        """Bytes that a rank receives in a weight sync."""
        return self.step.phase("weight sync").sent

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(phase.sent for phase in self.step.phases)


def sweep(
    config: RunConfig, shape: ModelDescription, gpu: Gpu, efficiency: EfficiencySection, least: int, most: int
) -> list[Point]:
    """Returns points from ``least`` to ``most`` GPUs, about doubling, that fit layout, engines and batches."""
    points = []
    for ranks in _counts(config, least, most):
        with suppress(UserError):
            sized = _sized(config, ranks)
            layout = check_layout(sized, sized.slurm.most_nodes, shape)
            if _feeds(sized, layout):
                step = predict_step(sized, shape, layout, gpu, efficiency)
                memory = predict_memory(sized, shape, layout, gpu.memory_gib, gpu.reserves)
                points.append(Point(ranks, layout, step, memory, tuple(shortages(sized, shape, memory, gpu))))
    if not points:
        raise UserError(
            f"no number of GPUs from {least} to {most} fits layout, engines and batches",
            where=_WHERE,
            remedy=f"use multiples of {_unit(config)}",
        )
    return points


def parse_range(text: str) -> tuple[int, int]:
    """The two numbers of ``96..1024``. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise UserError(f"{text!r}: invalid range", where=_WHERE, remedy="write it as 96..1024")
    return int(found[1]), int(found[2])


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Plots phases of the step, tokens per second beside linear scaling, and bytes per rank.

    Raises UserError if ``path`` cannot be written.
    """
    if not path.suffix:  # matplotlib would add one
        raise UserError(f"{str(path)!r} has no suffix", where="--plot", remedy="name a .png file")
    # Not pyplot, which keeps state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    seconds, speed, sizes = figure.subplots(1, 3)
    labels = [f"{point.ranks}\ndoes not fit" if point.lacks else str(point.ranks) for point in points]
    floor = [0.0] * len(points)
    for phase in points[0].step.phases:
        heights = [point.step.phase(phase.name).seconds for point in points]
        seconds.bar(labels, heights, bottom=floor, label=phase.name)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    seconds.set(xlabel="GPUs", ylabel="seconds per step", title=title)
    seconds.legend(fontsize="small", frameon=False)
    ranks, first = [point.ranks for point in points], points[0]
    speed.plot(ranks, [point.step.tokens_per_second for point in points], marker="o", label="tokens/s")
    ideal = [first.step.tokens_per_second * count / first.ranks for count in ranks]
    speed.plot(ranks, ideal, linestyle="--", color="0.6", label="linear scaling")
    _style(speed, ranks, "tokens per second")
    sizes.plot(ranks, [point.memory.peak / 1e9 for point in points], marker="o", label="peak memory")
    sizes.plot(ranks, [point.sent / 1e9 for point in points], marker="o", label="sent per step")
    sizes.plot(ranks, [point.received / 1e9 for point in points], marker="o", label="received per weight sync")
    _style(sizes, ranks, "GB per rank")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise UserError(f"cannot write {str(path)!r} ({error})", where="--plot", remedy="name a .png file") from None


def _style(axes: Any, ranks: Sequence[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(ranks), [str(count) for count in ranks])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="GPUs", ylabel=what)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)


def _unit(config: RunConfig) -> int:
    parallel = config.actor.parallel
    cut = lcm(parallel.tp * parallel.cp * parallel.pp, parallel.etp * parallel.ep * parallel.pp)
    tp, per_node = config.rollout.tp, config.resources.ranks_per_node
    trains, generates, judges = _shares(config)
    if not generates:
        return lcm(cut, tp, per_node)
    whole = trains + generates + judges
    needed = (cut // gcd(cut, trains), tp // gcd(tp, generates), per_node // gcd(per_node, whole))
    return whole * lcm(*needed)


def _shares(config: RunConfig) -> tuple[int, int, int]:
    """Returns the smallest numbers of ranks that train, generate and judge in the configured ratio; 1, 0 and 0 if all
    do both."""
    generates, judges = engine_ranks(config) or 0, judge_ranks(config)
    trains = training_ranks(config, config.world_size)
    common = gcd(trains, generates, judges)
    return trains // common, generates // common, judges // common


def _sized(config: RunConfig, ranks: int) -> RunConfig:
    """Returns the config on ``ranks`` GPUs, with the same share of ranks that generate."""
    sized = changed_config(config, {"slurm.nodes": ranks // config.resources.ranks_per_node})
    trains, generates, judges = _shares(config)
    if not generates:
        return sized
    each = ranks // (trains + generates + judges)
    split = {"rollout.ranks": each * generates, "rollout.nodes": None}
    if judges:
        split |= {"judges.ranks": each * judges, "judges.nodes": None}
    return changed_config(sized, split)


def _counts(config: RunConfig, least: int, most: int) -> list[int]:
    unit = _unit(config)
    count = max(1, -(-least // unit))
    counts: list[int] = []
    while count * unit <= most and len(counts) < _POINTS:
        counts.append(count * unit)
        count *= 2
    last = most // unit * unit
    return counts + ([last] if counts and last > counts[-1] else [])


def _feeds(config: RunConfig, layout: ParallelLayout) -> bool:
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
    return samples // config.train.minibatches >= layout.dp

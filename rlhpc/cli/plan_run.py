"""Text and JSON of ``rlhpc plan run``: layout, batches and model, memory by phase, time of a step and of the run."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.cli.json_text import json_text
from rlhpc.cli.plan_measure import mesh_rows
from rlhpc.cli.plan_memory import memory_json, render_memory
from rlhpc.cli.plan_placement import simulated_json
from rlhpc.cli.plan_time import run_json, step_json, step_lines
from rlhpc.cli.tables import labelled
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.run import outline
from rlhpc.plan.estimates.hardware import Reserves, cpu_memory_limit
from rlhpc.plan.estimates.memory import MemoryPlan, predict_memory
from rlhpc.plan.estimates.step_time import StepTime
from rlhpc.plan.remedies import changed_config, find_remedies
from rlhpc.plan.scenario import Scenario, make_scenario
from rlhpc.plan.shortages import Shortage, shortages
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import generating_ranks, ranks_with

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 140  # characters


@dataclass(frozen=True)
class _Prediction:
    """What is predicted of a run. ``case`` is None where no GPU is named, ``step`` also without RL steps. ``planned``:
    the config with the named GPU."""

    rows: list[tuple[str, str]]
    case: Scenario | None
    shape: ModelDescription
    layout: ParallelLayout
    step: StepTime | None
    memory: MemoryPlan
    lacks: list[Shortage]
    planned: RunConfig


def prediction(config: RunConfig, gpu: str | None, *, as_json: bool) -> tuple[list[str], bool]:
    """Lines of text or of JSON, and whether the run fits."""
    found = _predict(config, gpu)
    lines = [json_text(_as_json(config, found))] if as_json else _as_text(config, found)
    return lines, not found.lacks


def _as_text(config: RunConfig, found: _Prediction) -> list[str]:
    """The outline, the time of a step where a GPU is named, and a table of memory."""
    lines = labelled([*found.rows, *mesh_rows(found.planned, found.shape, found.layout)])
    if not config.train.steps:
        lines += labelled([("time", "is predicted for RL steps, of which there are none (train.steps)")])
    elif found.case is None or found.step is None:
        lines += labelled([("time", "of a step: name a GPU with --gpu, such as h200, or in planning.gpu")])
    else:
        lines += step_lines(found.case, found.step)
    gib = found.case.gpu.memory_gib if found.case else None
    remedies = find_remedies(config, found.shape, found.layout, found.memory)
    limit = cpu_memory_limit(config, found.case.gpu if found.case else None)
    lines += ["", *_rendered(render_memory(found.memory, gib, remedies, limit))]
    cache = [lack for lack in found.lacks if lack.what == "KV cache"]
    return lines + [
        f"DOES NOT FIT: {lack.where}: {lack.text} of a prompt with its response; {lack.remedy}" for lack in cache
    ]


def _as_json(config: RunConfig, found: _Prediction) -> dict[str, Any]:
    """The same, in seconds and bytes, with layouts as axes."""
    limit = cpu_memory_limit(config, found.case.gpu if found.case else None)
    times = {}
    if found.case and found.step:
        simulated = simulated_json(found.case, found.step)
        times = {"time": {**step_json(found.step), **simulated}, "run": run_json(found.case, found.step)}
    critic = config.critic.parallel if config.algorithm.name in WITH_CRITIC else None
    ranks = ranks_with(config, config.critic.on, found.layout.world_size)
    layouts = {
        "layout": found.layout.axes,
        "critic_layout": make_layout(critic, ranks).axes if critic is not None else None,
        "engines": {
            "count": generating_ranks(config, found.layout.world_size) // config.rollout.tp,
            "tp": config.rollout.tp,
        },
    }
    fits = {"fits": not found.lacks, "shortages": [lack.text for lack in found.lacks]}
    rows = [*found.rows, *mesh_rows(found.planned, found.shape, found.layout)]
    return {**dict(rows), **layouts, **fits, "memory": memory_json(found.memory, limit), **times}


def _predict(config: RunConfig, gpu: str | None) -> _Prediction:
    rows, case = list(outline(config)), make_scenario(config, gpu)
    shape = case.shape if case else resolve_model(config)
    layout = case.layout if case else check_layout(config, config.slurm.most_nodes, shape)
    gib, reserves = (case.gpu.memory_gib, case.gpu.reserves) if case else (None, Reserves())
    memory = predict_memory(config, shape, layout, gib, reserves)
    step = case.step() if case and config.train.steps else None
    lacks = shortages(config, shape, memory, case.gpu if case else None)
    planned = changed_config(config, {"planning.gpu": gpu}) if gpu is not None else config
    return _Prediction(rows, case, shape, layout, step, memory, lacks, planned)


def _rendered(what: RenderableType) -> list[str]:
    """Its lines, of the same width on any terminal."""
    from rlhpc.core.terminal import Terminal

    text = StringIO()
    Terminal(file=text, width=_WIDTH, color_system=None).print(what)
    return [line.rstrip() for line in text.getvalue().splitlines()]

"""Text and JSON of ``rlhpc plan run`` and ``measure``: layout, memory by phase, time of a step and of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.cli.output import json_text, labelled
from rlhpc.cli.plan_time import run_json, simulated_json, step_json, step_lines
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.run import outline
from rlhpc.plan.estimates.fsdp_activations import find_measured
from rlhpc.plan.estimates.hardware import Reserves, cpu_memory_limit
from rlhpc.plan.estimates.memory import MemoryPlan, chosen_accumulation, predict_memory
from rlhpc.plan.estimates.step_time import StepTime
from rlhpc.plan.measure import Measurement
from rlhpc.plan.remedies import Remedy, find_remedy
from rlhpc.plan.scenario import Scenario, Shortage, changed_config, make_scenario, shortages
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import backend_for, generating_ranks, ranks_with

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlhpc.plan.estimates.memory import MemoryPlan, PhaseMemory

_GIB = 1 << 30
_BAR = 40  # characters
# Letters of the bars, by the beginning of a part's name; all else is a dot.
_LETTERS = {
    "weights": "W",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "workspace": "A",
    "engine": "E",
    "KV": "K",
    "reference": "R",
    "critic": "C",
    "reward": "M",
}
_LEGEND = (
    "W weights, G gradients, O optimizer, A activations, E engine, K KV cache, R reference, C critic, M reward model"
)

_WIDTH = 140  # characters


def render_memory(
    plan: MemoryPlan,
    gpu_gib: float | None = None,
    remedy: Remedy | None = None,
    cpu_memory_limit: tuple[str, float] | None = None,
) -> RenderableType:
    """Table for a terminal. Bars have the scale of ``gpu_gib``, or of the fullest phase if that is larger.
    ``cpu_memory_limit``: that of a node, as the key that sets it and bytes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    limit = int(gpu_gib * _GIB) if gpu_gib else plan.gpu_bytes
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("a GPU, GiB")
    table.add_column("all", justify="right")
    table.add_column("")
    table.add_column("of which", overflow="fold")
    for rank, phases in plan.by_rank.items():
        if plan.engine_rank is not None:
            does = {plan.engine_rank: "generates", plan.judge_rank: "judges"}.get(rank, "trains")
            table.add_row(f"rank {rank}, {does}", "", "", "")
        for phase in phases:
            largest = sorted(phase.parts.items(), key=lambda item: -item[1])[:4]
            parts = ", ".join(f"{what} {_gib(size)}" for what, size in largest)
            table.add_row(phase.name, _gib(phase.total), Text(_bar(phase, limit or plan.peak, plan.peak)), parts)
    lines = [_LEGEND, *_verdict(plan, limit), *_cpu_lines(plan, cpu_memory_limit)]
    if remedy is not None:
        lines.append(f"  fits with  {remedy.text}  (at most {_gib(remedy.memory.peak)} GiB)")
    elif plan.first_too_large is not None:
        lines.append("  no usual change is enough: try other layouts with `rlhpc plan search`, or take more nodes")
    return Group(table, *(Text(line) for line in lines))


def memory_json(plan: MemoryPlan, cpu_memory_limit: tuple[str, float] | None = None) -> dict[str, object]:
    """The plan, in bytes."""
    too_large = plan.first_too_large
    limit = cpu_memory_limit[1] if cpu_memory_limit else None
    return {
        "rank": plan.rank,
        "phases": {phase.name: {**phase.parts, "total": phase.total} for phase in plan.phases},
        "cpu": {**plan.cpu.parts, "node": plan.cpu.node, "limit": limit},
        "first_too_large": too_large.name if too_large else None,
        **({} if plan.engine_rank is None else _role_json(plan, "engines", plan.engine_rank, plan.cpu.engine_parts)),
        **({} if plan.judge_rank is None else _role_json(plan, "judges", plan.judge_rank, plan.cpu.judge_parts)),
    }


def _role_json(plan: MemoryPlan, role: str, rank: int, cpu: Mapping[str, int]) -> dict[str, object]:
    """Phases of a rank that generates or judges, and its CPU memory."""
    phases = [phase.name for phase in plan.by_rank.get(rank, ())]
    return {role: {"rank": rank, "phases": phases, "cpu": dict(cpu)}}


def _bar(phase: PhaseMemory, limit: int, peak: int) -> str:
    """Bar of the parts to scale, with the GPU's memory as a line that larger phases cross."""
    letters: dict[str, int] = {}
    for what, size in phase.parts.items():
        letter = next((letter for begin, letter in _LETTERS.items() if what.startswith(begin)), ".")
        letters[letter] = letters.get(letter, 0) + size
    text, done, scale = "", 0, _BAR / max(limit, peak)
    for letter, size in letters.items():
        done += size
        text += letter * (round(done * scale) - len(text))
    mark = round(limit * scale)
    if done > limit and len(text) <= mark:  # by less than a letter
        text = f"{text:<{mark}}>"
    return f"{text[:mark]:<{mark}}|{text[mark:]}"


def _verdict(plan: MemoryPlan, limit: int | None) -> list[str]:
    tops = {rank: max(phase.total for phase in phases) for rank, phases in plan.by_rank.items()}
    most = "; ".join(f"rank {rank} needs most, {_gib(top)}" + ("" if limit else " GiB") for rank, top in tops.items())
    if limit is None:
        return [f"{most}; name a GPU to check whether that fits"]
    too_large = next((phase for phase in plan.phases if phase.total > limit), None)
    if too_large is None:
        return [f"{most} of {_gib(limit)} GiB"]
    missing, where = too_large.total - limit, f"{too_large.name} on rank {plan.rank_of(too_large)}"
    return [f"DOES NOT FIT: {where} needs {_gib(missing)} GiB more than {_gib(limit)}"]


def _cpu_lines(plan: MemoryPlan, limit: tuple[str, float] | None) -> list[str]:
    cpu, of = plan.cpu, f" of {_gib(limit[1])}" if limit else ""
    trains, generates, *judging = cpu.fullest
    words = [_cpu_words(trains, cpu.total, cpu.parts)] if trains else []
    words += [_cpu_words(generates, cpu.engine_total, cpu.engine_parts, " that generate(s)")] if generates else []
    words += [_cpu_words(count, cpu.judge_total, cpu.judge_parts, " of judges") for count in judging if count]
    lines = [f"CPU memory: {_gib(cpu.node)}{of} GiB a node, {'; '.join(words)}"]
    if limit and plan.cpu.node > limit[1]:
        missing = _gib(plan.cpu.node - limit[1])
        lines.append(
            f"DOES NOT FIT: a node needs {missing} GiB of CPU memory more than {limit[0]}; raise that, take more "
            "nodes or offload less (actor.memory.offload, actor.optimizer.optimizer_offload_fraction)"
        )
    return lines


def _cpu_words(ranks: int, total: int, parts: Mapping[str, int], which: str = "") -> str:
    named = ", ".join(f"{what} {_gib(size)}" for what, size in parts.items())
    return f"{ranks} rank(s){which} of {_gib(total)}: {named}"


def _gib(size: float) -> str:
    return f"{size / _GIB:,.1f}"


def measure_lines(found: Sequence[Measurement]) -> list[str]:
    """Measurements of each model."""
    return labelled([(one.key, _text(one)) for one in found])


def _text(one: Measurement) -> str:
    if one.measured is None:
        return "a known family, whose activations are counted without a measurement"
    each = one.measured.layers / one.layers / 1024
    outside = one.measured.outside / 1024
    return f"{each:,.1f} KiB per token and layer, {outside:,.1f} outside of {one.layers} layers; kept in {one.file}"


def measure_json(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The same in bytes."""
    return [
        {
            "key": one.key,
            "folder": str(one.folder),
            "file": None if one.file is None else str(one.file),
            "bytes_per_token": None if one.measured is None else asdict(one.measured),
        }
        for one in found
    ]


def mesh_rows(config: RunConfig, model: ModelDescription, layout: ParallelLayout) -> list[tuple[str, str]]:
    """Assumptions of the planner with FSDP2: the sum of gradients, and the source of activations."""
    if backend_for(config, model) != "fsdp":
        return []
    planned = chosen_accumulation(config, model, layout)
    by = "actor.memory.accumulation" if config.actor.memory.accumulation != "auto" else "chosen by the GPU's memory"
    texts = {
        "keep": f"summed over ranks after the last microbatch, whole on each rank until then ({by}: keep)",
        "reduce": f"summed over ranks after each microbatch ({by}: reduce)",
    }
    rows = [("gradients", texts[planned])]
    if isinstance(model, ModelShape):
        return rows
    if find_measured(config.model.path, config.model.dtype) is not None:
        return [*rows, ("memory", "activations as measured by `rlhpc plan measure`")]
    return [*rows, ("memory", "activations by a bound for any architecture; `rlhpc plan measure` measures this one's")]


@dataclass(frozen=True)
class _Prediction:
    """Prediction of a run. ``case`` is None where no GPU is named, ``step`` also without RL steps. ``planned``:
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
    lacks_memory = any(lack.what != "KV cache" for lack in found.lacks)
    remedy = find_remedy(found.case) if found.case is not None and lacks_memory else None
    limit = cpu_memory_limit(config, found.case.gpu if found.case else None)
    lines += ["", *_rendered(render_memory(found.memory, gib, remedy, limit))]
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

"""Tables of the page: each rank's place, predictions beside measurements, settings beside their defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from statistics import fmean, median
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import hide
from rlhpc.observe.page.numbers import Numbers, Steps
from rlhpc.plan.checks.judges import judge_layouts
from rlhpc.plan.checks.placement import check_roles
from rlhpc.sharding.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout, make_layout

MOST_RANKS = 4096
_ELSEWHERE = -1  # place of a rank on the axes of another role
Row = list[Any]  # name, unit, predicted, measured
REQUIRED = "required"
_LONGEST = 1000  # characters of a value


def pack_placement(config: RunConfig, attempt: Attempt | None, numbers: Numbers) -> dict[str, Any]:
    """Nodes, axes and each rank's coordinates, as of an attempt; without one as configured."""
    ranks = attempt.world_size if attempt else config.world_size
    nodes = list(attempt.nodes) if attempt else []
    roles = check_roles(config, ranks)
    shown = min(ranks, MOST_RANKS)
    layout = make_layout(config.actor.parallel, roles.trainers.size)
    axes: list[dict[str, Any]] = []

    def add(name: str, size: int, places: Iterable[int], **more: Any) -> None:
        found = [*places][:shown]
        axes.append({"name": name, "size": size, "places": numbers.put([*found, *[_ELSEWHERE] * (shown - len(found))])})
        axes[-1].update(more)

    if roles.separate:
        labels = {"trainers": "trainer", "judges": "judge", "engines": "engine"}
        role = [roles.roles.index(roles.role_of(rank)) for rank in range(shown)]
        add("role", len(roles.roles), role, labels=[labels[each.name] for each in roles.roles])
    for name, size, places in _axes("", layout, shown):
        add(name, size, places)
    if config.algorithm.name in WITH_CRITIC and config.critic.parallel is not None and config.critic.on == "trainers":
        for name, size, places in _axes("critic ", make_layout(config.critic.parallel, roles.trainers.size), shown):
            add(name, size, places)
    if roles.judges is not None:
        before = [_ELSEWHERE] * roles.judges.first
        for model, judged in judge_layouts(config).items():
            for name, size, places in _axes(f"{model} ", judged, shown):
                add(name, size, [*before, *places])
    if config.rollout.tp > 1 or roles.separate:
        first = roles.engines.first
        engines = [(rank - first) // config.rollout.tp if rank >= first else _ELSEWHERE for rank in range(shown)]
        add("engine", roles.num_engines, engines)
    text = layout.text
    if roles.separate:
        judging = f"{roles.judges.size} judge; " if roles.judges is not None else ""
        generating = f"{roles.engines.size} generate in {roles.num_engines} engine(s)"
        text = f"{roles.trainers.size} train, {text}; {judging}{generating}"
    return {"ranks": ranks, "nodes": nodes, "text": text, "axes": axes}


def _axes(prefix: str, layout: ParallelLayout, shown: int) -> Iterable[tuple[str, int, list[int]]]:
    """Axes of more than one rank; dp is always shown, those of experts if experts are divided."""
    experts = layout.etp * layout.ep > 1
    names = dict.fromkeys((*DENSE_AXES, *(EXPERT_AXES if experts else ())))
    ranks = range(min(layout.world_size, shown))
    return [
        (prefix + name, layout.size(name), [layout.coord(rank)[name] for rank in ranks])
        for name in names
        if layout.size(name) > 1 or name == "dp"
    ]


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
    from rlhpc.plan.calibrate import calibrate_times, read_attempts

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


def pack_settings(trees: list[dict[str, Any]]) -> list[list[Any]]:
    """[key, default, value of each run] of all keys, in the schema's order; None where a run lacks the key.

    ``trees``: the configurations as they are in the run folders, which lack secrets.
    """
    runs = [dict(_flat(hide(tree)[0])) for tree in trees]
    known: dict[str, str] = {}
    for tree in trees or [{}]:
        for key, value in _flat(_defaults(RunConfig, tree)):
            known.setdefault(key, value)
    keys = dict.fromkeys([*known, *(key for run in runs for key in run)])
    shown = [key for key in keys if not trees or any(key in run for run in runs)]
    return [[key, known.get(key), *(run.get(key) for run in runs)] for key in shown]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Values as text by their dotted keys; a list is one value."""
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        text = tree if isinstance(tree, str) else json.dumps(tree, default=str)
        yield path, text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _defaults(section: type[BaseModel], tree: Any) -> dict[str, Any]:
    """Default of each key of a section. Those of an optional section are shown if ``tree`` has it."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        given = tree.get(name) if isinstance(tree, dict) else None
        inner = _section(field.annotation)
        default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        if inner is not None and (field.is_required() or (default is None and isinstance(given, dict))):
            found[name] = _defaults(inner, given)
        else:
            found[name] = to_jsonable_python(default, fallback=str)
    return found


def _section(kind: Any) -> type[BaseModel] | None:
    """The one section that a field may hold."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return found[0] if len(found) == 1 else None

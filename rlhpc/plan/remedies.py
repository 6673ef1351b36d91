"""Change of a run that does not fit, with which it does, tried on the prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.plan.checks.parallelism import distance, misfits
from rlhpc.plan.checks.run import check_plannable
from rlhpc.plan.estimates.memory import MemoryPlan
from rlhpc.plan.layouts import legal_layouts
from rlhpc.plan.scenario import Scenario, changed_config, differences
from rlhpc.plan.search import Candidate, cut_of, fastest_of_each
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import backend_for, training_ranks

_NEAREST = 3  # layouts that fit, of which the fastest is taken
_TRIED = 12  # of the nearest cuts of the model, each with its nearest stages
_NODES = (2, 4, 8)  # times as many


@dataclass(frozen=True)
class Remedy:
    """Keys to change, and the resulting plan."""

    changes: Mapping[str, Any]
    memory: MemoryPlan

    @property
    def text(self) -> str:
        """The changes as command-line overrides."""
        return " ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.changes.items()
        )


def find_remedy(case: Scenario) -> Remedy | None:
    """Returns the fastest settings of the configured layout that fit in all phases, else those of the three nearest
    layouts that have any, else on more nodes; of the keys that they change, those without which the run does not fit.

    None if nothing of this fits.
    """
    for tried in _jobs(case.config):
        found = _fastest(replace(case, config=tried))
        remedy = _needed(case, found.config) if found is not None else None
        if remedy is not None:
            return remedy
    return None


def _jobs(config: RunConfig) -> Iterator[RunConfig]:
    """Yields the config as it is, with one copy of the weights, and on more nodes."""
    yield config
    if config.actor.parallel.dp_replicate > 1:
        config = changed_config(config, {"actor.parallel.dp_replicate": 1})
        yield config
    if isinstance(config.slurm.nodes, int):
        for factor in _NODES:
            yield changed_config(config, {"slurm.nodes": config.slurm.nodes * factor})


def _fastest(case: Scenario) -> Candidate | None:
    config, shape = case.config, case.shape
    ranks = training_ranks(config, config.world_size)
    stages = shape if isinstance(shape, ModelShape) else None
    far = partial(distance, stages, parallel=config.actor.parallel)
    own = [case.layout] if case.layout.world_size == ranks else []
    near: dict[tuple[int, ...], ParallelLayout] = {}
    for layout in sorted([*own, *legal_layouts(config, shape, ranks, case.gpu)], key=far):
        near.setdefault(cut_of(layout), layout)
    found = fastest_of_each(config, shape, [*near.values()][:_TRIED], case.gpu, case.efficiency)
    first = next(found, None)
    if first is None or first.layout in own:
        return first
    return min([first, *islice(found, _NEAREST - 1)], key=lambda one: one.step.seconds)


def _needed(case: Scenario, found: RunConfig) -> Remedy | None:
    """Returns the keys of ``found`` that differ and without which the run does not fit; None if it cannot run."""
    changes = dict(differences(case.config, found))
    groups = [[key for key in changes if key.startswith("actor.parallel.")], *([key] for key in changes)]
    before, memory = 0, _memory(case, changes)
    while len(changes) != before:  # a key may be needed only for one that is left out later
        before = len(changes)
        for group in groups:
            fewer = {key: value for key, value in changes.items() if key not in group}
            if len(fewer) < len(changes) and (less := _memory(case, fewer)) is not None:
                changes, memory = fewer, less
    return Remedy(changes, memory) if memory is not None else None


def _memory(case: Scenario, changes: Mapping[str, Any]) -> MemoryPlan | None:
    """Returns the memory of the changed run; None if it cannot run or does not fit."""
    config, shape = changed_config(case.config, changes), case.shape
    parallel = config.actor.parallel
    with suppress(UserError):
        if backend_for(config, shape) == "megatron" and isinstance(shape, ModelShape):
            layout = make_layout(parallel, training_ranks(config, config.world_size))
            if any(misfits(shape, layout, parallel)):  # found without a search for the nearest
                return None
        tried = replace(case, config=config, layout=check_plannable(config, shape))
        memory = tried.memory()
        return memory if not tried.lacks(memory) else None
    return None

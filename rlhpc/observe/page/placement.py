"""Which rank is on which node, its role, and its place on each axis of its role's layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import Attempt
from rlhpc.observe.page.packing import Numbers
from rlhpc.plan.checks.judges import judge_layouts
from rlhpc.plan.checks.placement import check_roles
from rlhpc.sharding.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout, make_layout

MOST_RANKS = 4096
_ELSEWHERE = -1  # place of a rank on the axes of another role


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

"""Which rank is on which node, and its place on each axis of the layout."""

from __future__ import annotations

from typing import Any

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import Attempt
from rlhpc.observe.page.packing import Numbers
from rlhpc.sharding.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout, make_layout

MOST_RANKS = 4096


def pack_placement(config: RunConfig, attempt: Attempt | None, numbers: Numbers) -> dict[str, Any]:
    """Nodes, axes and each rank's coordinates, as of an attempt; without one as configured."""
    ranks = attempt.world_size if attempt else config.world_size
    nodes = list(attempt.nodes) if attempt else []
    layout = make_layout(config.actor.parallel, ranks)
    axes = _axes("", layout, numbers)
    if config.algorithm.name in WITH_CRITIC and config.critic.parallel is not None:
        axes += _axes("critic ", make_layout(config.critic.parallel, ranks), numbers)
    if config.rollout.tp > 1:
        engines = [rank // config.rollout.tp for rank in range(min(ranks, MOST_RANKS))]
        axes.append({"name": "engine", "size": ranks // config.rollout.tp, "places": numbers.put(engines)})
    return {"ranks": ranks, "nodes": nodes, "text": layout.text, "axes": axes}


def _axes(prefix: str, layout: ParallelLayout, numbers: Numbers) -> list[dict[str, Any]]:
    """Axes of more than one rank; dp is always shown, those of experts if experts are divided."""
    experts = layout.etp * layout.ep > 1
    names = dict.fromkeys((*DENSE_AXES, *(EXPERT_AXES if experts else ())))
    shown = range(min(layout.world_size, MOST_RANKS))
    return [
        {
            "name": prefix + name,
            "size": layout.size(name),
            "places": numbers.put(layout.coord(rank)[name] for rank in shown),
        }
        for name in names
        if layout.size(name) > 1 or name == "dp"
    ]

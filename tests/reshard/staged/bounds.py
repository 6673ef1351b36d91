"""Bytes that a staged plan sends between nodes, and the least that any plan must."""

from __future__ import annotations

from collections import defaultdict

from rlhpc.reshard.plan import Side, cells_of, lower_bound
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.plan import StagedPlan
from rlhpc.sharding.shards import Box, Shard, TensorSpec


def network_bytes(plan: StagedPlan, ranks_per_node: int) -> dict[int, int]:
    """Bytes that the engines of each node receive from other nodes."""
    found: dict[int, int] = defaultdict(int)
    for rank in plan.heralds:
        found[rank // ranks_per_node] += plan.traffic[rank].received_across
    return dict(found)


def network_lower_bound(sides: SyncSides, ranks_per_node: int, itemsize: int) -> dict[int, int]:
    """Minimum bytes that each node of engines must receive: what any of its engines needs and no trainer on it holds.

    Computed from the sides alone.
    """
    held = {
        node: [s for rank in ranks for s in sides.source[rank]] for node, ranks in _nodes(sides.source, ranks_per_node)
    }
    needed = {}
    for node, ranks in _nodes(sides.target, ranks_per_node):
        boxes: dict[TensorSpec, set[Box]] = defaultdict(set)
        for rank in ranks:
            for shard in sides.target[rank]:
                boxes[shard.tensor].add(shard.box)
        cells = ((tensor, cell) for tensor, found in boxes.items() for cell, _ in cells_of(_ordered(found)))
        needed[node] = [Shard(tensor, cell, "", cell.start) for tensor, cell in cells]
    return lower_bound(held, needed, itemsize)


def _nodes(side: Side, ranks_per_node: int) -> list[tuple[int, list[int]]]:
    """The side's ranks on each node, ascending."""
    nodes = sorted({rank // ranks_per_node for rank in side})
    return [(node, sorted(rank for rank in side if rank // ranks_per_node == node)) for node in nodes]


def _ordered(boxes: set[Box]) -> list[Box]:
    return sorted(boxes, key=lambda box: (box.start, box.stop))

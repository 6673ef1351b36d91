"""What is summed where, so that both sides of a weight sync can be compared however they cut a tensor.

Made from the two layouts alone: a plan that copies wrongly does not make its own check wrong too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rlhpc.sharding.shards import Box, Shard, TensorSpec

Side = Mapping[int, Sequence[Shard]]


@dataclass(frozen=True)
class Sum:
    """The checksum of ``shard`` is a part of slot ``slot``; one slot per expert from there on, if it stacks experts."""

    slot: int
    shard: Shard


@dataclass(frozen=True)
class ChecksumPlan:
    """A slot is one box that some rank of the target side keeps (of a stack: one expert's part of it).

    ``expected``: what this rank adds to slots, each source element once; ``actual``: slots that it must agree with.
    """

    num_slots: int
    expected: tuple[Sum, ...]
    actual: tuple[Sum, ...]


def plan_checksums(source: Side, target: Side, rank: int) -> ChecksumPlan:
    """The part of ``rank``. Of ranks that hold the same source box each takes its share of the sums."""
    boxes: dict[TensorSpec, dict[Box, list[tuple[int, Shard]]]] = defaultdict(lambda: defaultdict(list))
    for holder in sorted(source):
        for shard in source[holder]:
            boxes[shard.tensor][shard.box].append((holder, shard))
    slots, num_slots, expected = _slots(target), 0, []
    for number, ((tensor, wanted), slot) in enumerate(slots.items()):
        num_slots = slot + slots_of(tensor, wanted)
        held = boxes[tensor]
        for box, part in _common(tuple(held), wanted):
            holder, shard = held[box][number % len(held[box])]
            if holder == rank:
                first = part.start[0] - wanted.start[0] if is_stack(tensor) else 0
                expected.append(Sum(slot + first, shard.part(part)))
    actual = tuple(Sum(slots[shard.tensor, shard.box], shard) for shard in target.get(rank, ()))
    return ChecksumPlan(num_slots, tuple(expected), actual)


def is_stack(tensor: TensorSpec) -> bool:
    """The tensor is a layer's experts, one for each index of its first dimension."""
    return len(tensor.shape) == 3


def slots_of(tensor: TensorSpec, box: Box) -> int:
    """Slots that a box takes."""
    return box.shape[0] if is_stack(tensor) else 1


def _slots(target: Side) -> dict[tuple[TensorSpec, Box], int]:
    """The first slot of every box of the target side. Ranks that are cut alike have theirs in common."""
    slots: dict[tuple[TensorSpec, Box], int] = {}
    count, seen = 0, set()
    for rank in sorted(target):
        if id(target[rank]) in seen:
            continue
        seen.add(id(target[rank]))
        for shard in target[rank]:
            key = shard.tensor, shard.box
            if key not in slots:
                slots[key] = count
                count += slots_of(*key)
    return slots


@lru_cache(maxsize=1 << 16)
def _common(boxes: tuple[Box, ...], wanted: Box) -> tuple[tuple[Box, Box], ...]:
    """(box, part of it that is wanted) for the boxes that have one; they must make up the wanted box."""
    met = ((box, box.meet(wanted)) for box in boxes)
    found = tuple((box, part) for box, part in met if part is not None)
    assert sum(part.volume for _, part in found) == wanted.volume, f"{wanted} is not made up of {boxes}"
    return found

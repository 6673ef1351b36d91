"""Plan of the checksums that compare both sides of a weight sync, regardless of how each cuts a tensor.

Computed from the two layouts alone, so that a wrong reshard plan cannot make its own check wrong.
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
    """Adds the checksum of ``shard`` to slot ``slot``; for a stack of experts, to one slot per expert from there on."""

    slot: int
    shard: Shard


@dataclass(frozen=True)
class ChecksumPlan:
    """Slots and this rank's terms. A slot is one box of the target side (for a stack: one expert's part of it).

    ``expected``: terms that this rank adds, each source element once over all ranks; ``actual``: slots that its own
    engine parameters must match.
    """

    num_slots: int
    expected: tuple[Sum, ...]
    actual: tuple[Sum, ...]


def plan_checksums(source: Side, target: Side, rank: int) -> ChecksumPlan:
    """The plan of one rank. Ranks that hold the same source box divide its sums among them."""
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
    """True if the tensor stacks a layer's experts along its first dimension."""
    return len(tensor.shape) == 3


def slots_of(tensor: TensorSpec, box: Box) -> int:
    """Number of slots of a box."""
    return box.shape[0] if is_stack(tensor) else 1


def _slots(target: Side) -> dict[tuple[TensorSpec, Box], int]:
    """The first slot of each box of the target side. Ranks with equal boxes share slots."""
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
    """(box, its overlap with ``wanted``) for all boxes that overlap. Asserts that they cover ``wanted``."""
    met = ((box, box.meet(wanted)) for box in boxes)
    found = tuple((box, part) for box, part in met if part is not None)
    assert sum(part.volume for _, part in found) == wanted.volume, f"{wanted} is not made up of {boxes}"
    return found

"""The transfers of ``rlhpc.plan.transfer`` between real ranks. All calls are collective over the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.transfer import Transfer

T = TypeVar("T")


def gather_parts(transfer: Transfer, layout: ParallelLayout, mine: T) -> list[T]:
    """Every part's value on every rank, in the order of the parts; one rank of each part sends it."""
    speakers = [transfer.speaker(layout, part) for part in range(transfer.parts(layout))]
    sent: list[T | None] = [None] * layout.world_size
    dist.all_gather_object(sent, mine if dist.get_rank() in speakers else None)
    return [sent[rank] for rank in speakers]  # type: ignore[misc]


def gather_items(transfer: Transfer, layout: ParallelLayout, mine: Sequence[T]) -> list[T]:
    """The items of all parts end to end: what ``Transfer.share`` has taken apart, in its order."""
    return [item for part in gather_parts(transfer, layout, mine) for item in part]


def one_to_all(value: T, speaker: int = 0) -> T:
    """The speaker's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=speaker)
    return box[0]

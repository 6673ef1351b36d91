"""What both ends of a staged weight sync know of their job."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class StagedJob:
    """The job as one of its ranks sees it. ``rank``: its number in the job; ``store``: the job's own store."""

    rank: int
    ranks_per_node: int
    dtype: torch.dtype
    device: torch.device
    store: dist.Store
    timeout_minutes: float = 30.0

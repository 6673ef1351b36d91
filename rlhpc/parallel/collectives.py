"""Last collectives of this rank's process groups, from torch's flight recorder.

The recorder is on by default and records every collective on gloo and NCCL, including Megatron's and the engine's. It
records sends and receives on NCCL only, so they are left out. So are pairs (``rlhpc.parallel.pairs``): a rank may
begin to receive there long before another one sends.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.core.heartbeat import Collective, GroupState
from rlhpc.parallel.groups import joined

RECENT = 8  # collectives of each group, besides unfinished ones
# One recorder for the CPU's back ends, one for NCCL's; a build of torch has those that it needs (c10d/init.cpp).
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def last_collectives() -> list[GroupState]:
    """Groups with a collective among the last 2,000 of this process. Never waits for other ranks."""
    entries = [entry for name in _RECORDERS for entry in _entries(name)]
    members = _members()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        if not entry["is_p2p"] and entry["process_group"][0]:  # a pair has no name
            found.setdefault((entry["process_group"][0], entry["profiling_name"].partition(":")[0]), []).append(entry)
    here = joined()
    role, first = (here.info.role, here.info.first) if here is not None else ("", 0)
    states = [_state(group, backend, members.get(group, ()), calls) for (group, backend), calls in found.items()]
    return [replace(state, role=role, ranks=tuple(first + rank for rank in state.ranks)) for state in states]


def _entries(recorder: str) -> list[dict[str, Any]]:
    dump = getattr(torch._C._distributed_c10d, recorder, None)
    return json.loads(dump()).get("entries", []) if dump is not None else []


def _members() -> dict[str, tuple[int, ...]]:
    """The world's ranks by name of their group. For groups without this rank, torch has a number in place of the
    group."""
    groups = list(dist.distributed_c10d._world.pg_group_ranks.items())
    return {g.group_name: tuple(sorted(ranks)) for g, ranks in groups if isinstance(g, dist.ProcessGroup)}


def _state(group: str, backend: str, ranks: tuple[int, ...], entries: list[dict[str, Any]]) -> GroupState:
    calls = [
        Collective(
            sequence=entry["collective_seq_id"],
            operation=entry["profiling_name"].partition(":")[2],
            sizes=tuple(tuple(size) for size in entry["input_sizes"]),
            finished=entry["retired"] or entry["state"] == "completed",
        )
        for entry in entries
    ]
    recent = [call for place, call in enumerate(calls) if not call.finished or place >= len(calls) - RECENT]
    description = entries[-1]["process_group"][1]
    return GroupState(group, "" if description == "undefined" else description, backend, ranks, tuple(recent))

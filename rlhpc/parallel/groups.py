"""Process groups: the default group of a job, Megatron's groups for each layout, and their last collectives.

The last collectives come from torch's flight recorder. It is on by default and records every collective on gloo and
NCCL, including Megatron's and the engine's. It records sends and receives on NCCL only, so they are left out. So are
pairs (``rlhpc.parallel.pairs``): a rank may begin to receive there long before another one sends.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.core import env
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core.heartbeat import Collective, GroupState
from rlhpc.core.rank import RankInfo
from rlhpc.core.store_client import TRAINERS, TrainersStart
from rlhpc.parallel import compat
from rlhpc.parallel.compat import (
    MegatronGlobals,
    exchange_megatron_globals,
    initialize_model_parallel,
    seed_rng_tracker,
)
from rlhpc.parallel.gloo import gloo_maker
from rlhpc.parallel.store import group_timeout, number_of, open_store, use_secret, use_timeout
from rlhpc.sharding.layout import ParallelLayout

RECENT = 8  # collectives of each group, besides unfinished ones
# One recorder for the CPU's back ends, one for NCCL's; a build of torch has those that it needs (c10d/init.cpp).
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True)
class Joined:
    """Group that this process has joined: its rank, the store in which all of the job's ranks meet, and the trainers'
    start that it belongs to."""

    info: RankInfo
    store: dist.Store
    trainers: TrainersStart = field(default_factory=TrainersStart)


_joined: list[Joined] = []


def join(info: RankInfo, timeout_minutes: float = 30, *, verify_connections: bool = True) -> None:
    """Joins the default process group of this rank's world: NCCL with a GPU, gloo without.

    The ranks meet in the job's own store if the launcher has named one, else at MASTER_ADDR and MASTER_PORT, where
    torch's TCPStore lets any user of the cluster read and write. With a role, the group has only the role's ranks,
    which meet under a prefix of their own, and the environment names the rank in the role, for libraries.

    ``timeout_minutes``: of every group of the process, those of Megatron, FSDP, checkpoints and vLLM too.
    """
    use_timeout(60 * timeout_minutes)
    compat.follow_group_timeout()
    os.environ.setdefault(env.MASTER_ADDR, info.master_addr)  # for libraries that read it
    os.environ.setdefault(env.MASTER_PORT, str(info.master_port or 29500))
    on_gpu = _select_gpu(info)
    if info.role:
        info.export()
    store = _store(info, verify_connections=verify_connections)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore(f"world {info.role} {info.first} {info.generation}", store) if info.role else store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=group_timeout(),
    )
    _joined[:] = [Joined(info, store)]


def _select_gpu(info: RankInfo) -> bool:
    """Selects the GPU of this rank; False on a CPU.

    Raises UserError if the launcher has chosen GPUs and PyTorch finds none for this rank, which would compute on the
    CPU or share another one's. Ranks of other launchers may share GPUs.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if info.local_rank >= count and env.RLHPC_GPU_SECONDS in os.environ:
        without = torch.version.cuda is None
        raise (UserError if without else NodeError)(
            "this PyTorch is built without CUDA" if without else f"PyTorch finds {count} usable GPUs",
            where=f"rank {info.job_rank} (local rank {info.local_rank}) on node {info.node}",
            remedy="install a build with CUDA, or set slurm.gpus_per_node: 0 (`rlhpc run`: CUDA_VISIBLE_DEVICES=) to "
            "compute on the CPU",
        )
    if count:
        torch.cuda.set_device(info.local_rank % count)
    return count > 0


def joined() -> Joined | None:
    """Group that this process has joined last with ``join``; None if it has not."""
    return _joined[0] if _joined else None


def job_store() -> dist.Store:
    """The store in which all of the job's ranks meet, those of other roles too: for boards, channels and pairs."""
    assert _joined, "join() comes first"
    prefix = _joined[0].trainers.prefix
    return dist.PrefixStore(prefix, _joined[0].store) if prefix else _joined[0].store


def present_trainers() -> TrainersStart:
    """The trainers' newest start, as the launcher has posted it."""
    assert _joined, "join() comes first"
    store = _joined[0].store.clone()
    return TrainersStart.from_json(store.get(TRAINERS) if store.check([TRAINERS]) else None)


def follow(trainers: TrainersStart) -> None:
    """Meets the job's other ranks as one of the ranks of that start from now on."""
    assert _joined, "join() comes first"
    _joined[0] = replace(_joined[0], trainers=trainers)


def _store(info: RankInfo, *, verify_connections: bool) -> dist.Store:
    """Store in which this rank finds the others."""
    store, timeout = open_store(), group_timeout()
    if store is not None:
        use_secret(store.secret)
        os.environ.setdefault(env.NCCL_SOCKET_MAGIC, str(number_of(store.secret)))
        compat.authenticate_objects()
        if verify_connections:
            compat.replace_gloo(gloo_maker(store))
        store.set_timeout(timeout)
        return store
    if info.job_size == 1 and not info.master_port:
        return dist.HashStore()  # a single rank needs no port, which somebody else could take
    met: dist.Store = next(dist.rendezvous("env://", info.job_rank, info.job_size, timeout=timeout))[0]
    met.set_timeout(timeout)
    return met


class Groups:
    """Megatron's process groups for one layout. ``with groups:`` activates them, and restores those active before."""

    def __init__(self, layout: ParallelLayout) -> None:
        """Creates the groups and leaves those active that are. Collective."""
        self.layout = layout
        self._former: list[MegatronGlobals] = []
        self._own: MegatronGlobals = {}
        with self:
            initialize_model_parallel(layout)

    def __enter__(self) -> Groups:
        self._former.append(exchange_megatron_globals(self._own))
        return self

    def __exit__(self, *_: object) -> None:
        self._own = exchange_megatron_globals(self._former.pop())


def build_groups(layout: ParallelLayout, seed: int) -> Groups:
    """Activates groups for the rest of the process, and seeds Megatron's random-number tracker. Collective."""
    groups = Groups(layout)
    groups.__enter__()
    seed_rng_tracker(seed)
    return groups


def engine_group(world_size: int, rank: int, tp: int) -> dist.ProcessGroup | None:
    """Gloo group of this rank's engine, a block of ``tp`` ranks; None for an engine of one. Collective."""
    if tp == 1:
        return None
    groups = [dist.new_group(range(start, start + tp), backend="gloo") for start in range(0, world_size, tp)]
    return groups[rank // tp]


def leave() -> None:
    """Leaves every group. For a normal end only: after an error other ranks may not respond."""
    if dist.is_initialized():
        dist.destroy_process_group()


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

"""Both ends of a staged weight sync on real ranks, with plain tensors in place of actor and engine."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.config.schema import ReshardSection
from rlhpc.core import env
from rlhpc.reshard.sides import SyncSides, sync_sides
from rlhpc.reshard.staged import job as staged_job
from rlhpc.reshard.staged.job import StagedJob
from rlhpc.reshard.staged.layout import StagingMemory
from rlhpc.reshard.staged.source import FullSender, WeightSource
from rlhpc.reshard.staged.target import DeltaReceiver, WeightTarget
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Shard, TensorSpec
from tests.helpers.blocks import Parameters, shape_of_kind, whole

BUCKET = 1 << 15  # the tiny models have several


@dataclass(frozen=True)
class Case:
    """Trainers with axes and engines of ``tp`` ranks, on nodes of ``per_node`` ranks."""

    kind: str
    trainers: int
    engines: int
    tp: int = 1
    per_node: int = 8
    dtype: torch.dtype = torch.float32
    axes: Mapping[str, int] = field(default_factory=dict)
    verify: Any = "always"
    vocab: int = 200
    delta: str = "off"
    rate: float = 1.0  # share of the elements that a version changes
    bucket: int = BUCKET

    @property
    def ranks(self) -> int:
        return self.trainers + self.engines * self.tp

    @property
    def sides(self) -> SyncSides:
        shape = shape_of_kind(self.kind, num_hidden_layers=4, vocab_size=self.vocab)
        training, engines = ParallelLayout(self.trainers, **self.axes), range(self.trainers, self.ranks)
        return sync_sides(shape, training, EngineLayout(self.tp), range(self.trainers), engines)

    @property
    def section(self) -> ReshardSection:
        return ReshardSection(verify=self.verify, bucket_mib=self.bucket // BUCKET, delta=self.delta)


def value(shard: Shard, version: int, case: Case) -> Tensor:
    """What the whole tensor is in a version."""
    if case.rate == 1.0:
        return whole(shard.tensor, case.dtype) * (version + 1)
    return _updated(shard.tensor, version, case.dtype, case.rate)


@lru_cache(maxsize=1000)
def _updated(spec: TensorSpec, version: int, dtype: torch.dtype, rate: float) -> Tensor:
    tensor = whole(spec, dtype)
    for past in range(version):  # as an optimizer does: the last bits of some
        draws = np.random.default_rng([past, *spec.name.encode()]).random(tensor.shape)
        changed = torch.from_numpy(draws < rate)
        bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
        bits[changed] += torch.from_numpy(1 - 2 * (draws < rate / 2)).to(bits.dtype)[changed]
    return tensor


class Actor:
    """Parameters of a trainers' rank, which ``train`` changes."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self.parameters = case, Parameters(case.sides.source[rank], False, case.dtype)

    def train(self, version: int) -> None:
        for shard in self.parameters.shards:
            self.view(shard).copy_(value(shard, version, self._case)[shard.box.slices])

    def view(self, shard: Shard) -> Tensor:
        return self.parameters.view(shard)


class Engine:
    """Parameters of an engine's rank, which have no values until they are written."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self.parameters = case, Parameters(case.sides.target[rank], False, case.dtype)
        self.opened = self.closed = 0

    def open_weights(self, *, in_flight: bool) -> Mapping[str, Tensor]:
        assert in_flight
        self.opened += 1
        for tensor in self.parameters.tensors.values():
            tensor.fill_(torch.nan)
        return {name: tensor for (_, name), tensor in self.parameters.tensors.items()}

    def close_weights(self) -> None:
        self.closed += 1

    def wrong(self, version: int) -> list[str]:
        """Names of the tensors whose bits are not those of the version."""
        return [
            shard.tensor.name
            for shard in self.parameters.shards
            if not torch.equal(
                self.parameters.view(shard), value(shard, version, self._case)[shard.box.slices].contiguous()
            )
        ]


def staging_of(target: WeightTarget) -> list[StagingMemory]:
    """Staging memory of an engine's rank that holds no version."""
    return target._free


def held_bytes(end: WeightSource | WeightTarget) -> int:
    """Bytes that an end holds all the time."""
    if isinstance(end, WeightTarget):
        receiver: Any = end._receiver
        staging, buffers = [*staging_of(end), *(each.staging for each in end._arrived.values())], [end._buffer]
        buffers += [receiver.buffer] if isinstance(receiver, DeltaReceiver) else []
    else:
        sender: Any = end._sender
        staging, buffers = [sender.staging], [sender._packing.buffer]
        if not isinstance(sender, FullSender):
            staging, buffers = [*staging, sender._last], [*buffers, sender._old]
    return sum(each._memory.numel() for each in staging) + sum(buffer.numel() for buffer in buffers)


LEAVING = ("ended", "left")  # who has the store must not take it from those that still wait in it


def leave_for(store: dist.Store, rank: int) -> None:
    """Notes that a rank has left that cannot do so itself."""
    for moment in LEAVING:
        store.set(f"{moment} {rank}", "1")


@contextmanager
def job_of(case: Case, host: int = 0) -> Iterator[StagedJob]:
    """The job of this rank, and a world of its role. All ranks leave together; the ``host`` has the store."""
    staged_job.MIB = BUCKET
    rank = int(os.environ[env.RANK])
    address, port = os.environ[env.MASTER_ADDR], int(os.environ[env.MASTER_PORT])
    store = dist.TCPStore(address, port, is_master=rank == host, wait_for_workers=False)
    role = range(case.trainers) if rank < case.trainers else range(case.trainers, case.ranks)
    world = dist.PrefixStore(f"world of {role.start}", store.clone())
    minutes = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", store=world, rank=rank - role.start, world_size=len(role), timeout=minutes)
    yield StagedJob(rank, case.per_node, case.dtype, torch.device("cpu"), store)
    for moment in LEAVING:
        store.set(f"{moment} {rank}", "1")
        if moment == "ended" or rank == host:
            store.wait([f"{moment} {other}" for other in range(case.ranks)], minutes)
    dist.destroy_process_group()

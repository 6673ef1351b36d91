"""Keeps the engine's weights equal to the trainer's: plans once, syncs when asked, and verifies itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.api import RolloutEngine, TrainBackend
from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import ReshardError
from rlhpc.reshard import gather
from rlhpc.reshard.checksum_plan import ChecksumPlan, plan_checksums
from rlhpc.reshard.executor import Mover
from rlhpc.reshard.sides import SyncSides, aliases, plan_weight_sync
from rlhpc.reshard.verify import differing
from rlhpc.sharding.shards import Shard

MIB = 1 << 20
_NAMED = 4  # weights that an error names on each rank


@dataclass(frozen=True)
class Job:
    """What the manager has to know of the job. ``group`` holds the ranks of both sides; None: all of the job."""

    ranks_per_node: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None = None


class ReshardManager:
    """Syncs the actor's weights into the engine on this rank. All calls are collective over both sides' ranks.

    A rank of the training side alone has no engine, one of the rollout side alone no actor. As a context the engine is
    awake with the newest weights inside, and sleeps after.
    """

    def __init__(
        self,
        actor: TrainBackend | None,
        engine: RolloutEngine | None,
        sides: SyncSides,
        section: ReshardSection,
        job: Job,
    ) -> None:
        self.policy_version = 0
        self._actor, self._engine, self._section, self._job = actor, engine, section, job
        self.sides, self._weight_syncs = sides, 0
        self._shared: dict[str, Shard] = {}
        if section.method == "gather":
            assert actor is not None, "whole tensors are gathered where both sides are on the same ranks"
            return
        rank = dist.get_rank()
        self.plan = plan_weight_sync(
            sides,
            ranks_per_node=job.ranks_per_node,
            bucket_bytes=section.bucket_mib * MIB,
            itemsize=job.dtype.itemsize,
            rank=rank,
        )
        self._check_plans()
        self._checksums: ChecksumPlan | None = None
        self._parameters: Mapping[str, Tensor] = {}
        if section.share_weights and engine is not None:
            self._shared = self._find_shared(rank)
        self._mover = Mover(self.plan, job.dtype, job.device, job.group, frozenset(self._shared))

    def __enter__(self) -> RolloutEngine | None:
        self.sync()
        return self._engine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sleep()

    def sync(self) -> None:
        """Wake the engine with the actor's weights; the weights first and the KV cache after.

        What only training needs leaves the device before the engine grows, the actor's weights before the cache comes
        back. Raises ReshardError on every rank, with nothing written, when requests are under way on one.
        """
        self._refuse_unfinished()
        if self._section.method == "gather":
            gather.sync(self._actor, self._engine)
        else:
            self._sync_directly()
        self._weight_syncs += 1
        self.policy_version += 1

    def sleep(self) -> None:
        """Give the memory of the engine back, weights and cache."""
        if self._engine is not None:
            self._engine.sleep()

    def _sync_directly(self) -> None:
        if self._actor is not None:
            self._actor.offload(keep_parameters=True)
        if self._engine is not None:
            self._engine.wake_weights()
        self.write()
        if self._verifies:
            self.verify()
        self._parameters = {}
        if self._engine is not None:
            self._engine.close_weights()
        if self._actor is not None:
            self._actor.offload()
        if self._engine is not None:
            self._engine.wake_cache()

    def write(self) -> None:
        """Move the weights into the engine's open parameters."""
        if self._engine is not None:
            for name, source in self._shared.items():
                self._engine.share(name, self._actor.view(source))
            self._parameters = self._engine.open_weights()
        self._mover.move(self._read, self._written)

    def verify(self) -> None:
        """Compare both sides' checksums; a ReshardError on every rank names weights that differ and their ranks."""
        if self._checksums is None:
            self._checksums = plan_checksums(self.sides.source, self.sides.target, dist.get_rank())
        wrong = differing(
            self._checksums, self._read, self._written, self._mover.wire_dtype, self._job.device, self._job.group
        )
        self._raise_together("weights differ after a weight sync", wrong)

    @property
    def shared_parameters(self) -> frozenset[str]:
        """The engine's parameters on this rank that lie in the trainer's memory."""
        return frozenset(self._shared)

    @property
    def _verifies(self) -> bool:
        every = self._section.verify
        return every == "always" or (isinstance(every, int) and self._weight_syncs % every == 0)

    def _read(self, shard: Shard) -> Tensor:
        return self._actor.view(shard)

    def _written(self, shard: Shard) -> Tensor:
        return self._parameters[shard.local_name][shard.local_box.slices].view(shard.box.shape)

    def _refuse_unfinished(self) -> None:
        count = self._engine.unfinished if self._engine is not None else 0
        self._raise_together(
            "weights cannot be synced beneath requests under way (finish or abort them first)",
            [f"{count} requests"] if count else [],
        )

    def _check_plans(self) -> None:
        """Every rank has made the same plan."""
        digests = self._gather(self.plan.digest)
        common = max(set(digests.values()), key=list(digests.values()).count)
        others = sorted(rank for rank, digest in digests.items() if digest != common)
        if others:
            raise ReshardError(f"ranks {others} plan another movement of weights than the others")

    def _find_shared(self, rank: int) -> dict[str, Shard]:
        """Parameters of the engine that are a contiguous block of the trainer's memory, and that it takes as is."""
        found, allowed, shapes = {}, self._engine.shareable(), self._engine.weight_shapes()
        for alias in aliases(self.plan.local(rank), shapes):
            if alias.name in allowed and self._read(alias.source).is_contiguous():
                found[alias.name] = alias.source
        return found

    def _raise_together(self, what: str, mine: list[str]) -> None:
        """A ReshardError on all ranks if one has something to tell."""
        told = {rank: names for rank, names in self._gather(mine[:_NAMED]).items() if names}
        if told:
            where = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in list(told.items())[:_NAMED])
            raise ReshardError(f"{what}: {where}" + (f"; and {len(told) - _NAMED} ranks more" * (len(told) > _NAMED)))

    def _gather(self, value: object) -> dict[int, object]:
        group = self._job.group or dist.group.WORLD
        values: list[object] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return dict(zip(dist.get_process_group_ranks(group), values, strict=True))

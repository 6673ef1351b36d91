"""Weight sync from the trainer to the engine: plans once, syncs on request, verifies with checksums.

The method ``gather`` syncs whole tensors, which the engine's own loader cuts. It is simple and slow; the faster method
is tested against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.api import CheckWeights, RolloutEngine, TrainBackend
from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import ReshardError
from rlhpc.core.heartbeat import touch
from rlhpc.reshard.checksum_plan import ChecksumPlan, plan_checksums
from rlhpc.reshard.executor import Mover, wire_dtype
from rlhpc.reshard.sides import SyncSides, aliases, plan_weight_sync
from rlhpc.reshard.verify import differing
from rlhpc.sharding.shards import Shard, TensorSpec

MIB = 1 << 20
_COLOCATED = "reshard.method gather needs an actor and an engine on every rank"
_NAMED = 4  # ranks that an error names, and weights per rank

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """The job's ranks and device, as far as the manager needs them. ``group`` holds the ranks of both sides; None: all
    ranks of the job."""

    ranks_per_node: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None = None


class ReshardManager:
    """Syncs the actor's weights into the engine on this rank. All calls are collective over both sides' ranks.

    A rank that only trains has no engine, one that only generates has no actor. As a context manager it syncs on entry,
    which wakes the engine, and puts the engine to sleep on exit.
    """

    def __init__(
        self,
        actor: TrainBackend | None,
        engine: RolloutEngine | None,
        sides: SyncSides,
        section: ReshardSection,
        job: Job,
    ) -> None:
        self._actor, self._engine, self._section, self._job = actor, engine, section, job
        self.sides, self._weight_syncs = sides, 0
        self._shared: dict[str, Shard] = {}
        self._checksums: ChecksumPlan | None = None
        self._parameters: Mapping[str, Tensor] = {}
        self.streamed: Streamed | None = None  # by the last weight sync through whole tensors
        if section.method == "gather":
            assert actor is not None, _COLOCATED
            assert engine is not None, _COLOCATED
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
        if section.share_weights and engine is not None:
            self._shared = self._find_shared(engine, rank)
        self._mover = Mover(self.plan, job.dtype, job.device, job.group, frozenset(self._shared))

    def __enter__(self) -> RolloutEngine | None:
        self.sync()
        return self._engine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sleep()

    def sync(self) -> None:
        """Wakes the engine with the actor's weights, then its KV cache.

        Training-only state leaves the device before the engine's weights are allocated, the actor's weights before the
        cache is. Raises ReshardError on every rank, with nothing written, if requests are in flight on any.
        """
        self._refuse_unfinished()
        if self._section.method == "gather":
            assert self._actor is not None, _COLOCATED
            assert self._engine is not None, _COLOCATED
            self.streamed = sync_whole_tensors(
                self._actor, self._engine, self._verify_loaded if self._verifies else None
            )
        else:
            self._sync_directly()
        self._weight_syncs += 1

    def sleep(self) -> None:
        """Frees the engine's weights and KV cache."""
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
        """Writes the weights into the engine's open parameters."""
        if self._engine is not None:
            for name, source in self._shared.items():
                self._engine.share(name, self._read(source))
            self._parameters = self._engine.open_weights()
        self._mover.move(self._read, self._written)

    def _verify_loaded(self, parameters: Mapping[str, Tensor]) -> None:
        """Verifies what the engine's own loader has written."""
        self._parameters = parameters
        self.verify()
        self._parameters = {}

    def verify(self) -> None:
        """Compares both sides' checksums. Raises a ReshardError on every rank that names the differing weights."""
        if self._checksums is None:
            self._checksums = plan_checksums(self.sides.source, self.sides.target, dist.get_rank())
        wrong = differing(
            self._checksums, self._read, self._written, self._wire_dtype, self._job.device, self._job.group
        )
        self._raise_together("weights differ after a weight sync", wrong)

    @property
    def shared_parameters(self) -> frozenset[str]:
        """Parameters of the engine on this rank that use the trainer's memory."""
        return frozenset(self._shared)

    @property
    def _verifies(self) -> bool:
        every = self._section.verify
        return every == "always" or (isinstance(every, int) and self._weight_syncs % every == 0)

    def _wire_dtype(self, tensor: TensorSpec) -> torch.dtype:
        return wire_dtype(tensor, self._job.dtype)

    def _read(self, shard: Shard) -> Tensor:
        assert self._actor is not None, "only a rank that trains has source shards"
        return self._actor.view(shard)

    def _written(self, shard: Shard) -> Tensor:
        return self._parameters[shard.local_name][shard.local_box.slices].view(shard.box.shape)

    def _refuse_unfinished(self) -> None:
        count = self._engine.unfinished if self._engine is not None else 0
        self._raise_together(
            "weights cannot be synced while requests are in flight (finish or abort them first)",
            [f"{count} requests"] if count else [],
        )

    def _check_plans(self) -> None:
        """Raises a ReshardError unless every rank computed the same plan."""
        digests = self._gather(self.plan.digest)
        common = max(set(digests.values()), key=list(digests.values()).count)
        others = sorted(rank for rank, digest in digests.items() if digest != common)
        if others:
            raise ReshardError(f"ranks {others} computed another weight sync plan than the others")

    def _find_shared(self, engine: RolloutEngine, rank: int) -> dict[str, Shard]:
        """Parameters that the engine can use in the trainer's memory: contiguous blocks of it."""
        found, allowed, shapes = {}, engine.shareable(), engine.weight_shapes()
        for alias in aliases(self.plan.local(rank), shapes):
            if alias.name in allowed:
                own = self._read(alias.source)
                if own.is_contiguous() and own.dtype == self._wire_dtype(alias.source.tensor):
                    found[alias.name] = alias.source
        return found

    def _raise_together(self, what: str, mine: list[str]) -> None:
        """Raises a ReshardError on all ranks if ``mine`` is not empty on any."""
        by_rank = {rank: names for rank, names in self._gather(mine[:_NAMED]).items() if names}
        if by_rank:
            where = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in list(by_rank.items())[:_NAMED])
            more = len(by_rank) - _NAMED
            raise ReshardError(f"{what}: {where}" + (f"; and {more} more ranks" if more > 0 else ""))

    def _gather(self, value: T) -> dict[int, T]:
        """Every rank's value, by rank."""
        group = self._job.group or dist.group.WORLD
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


@dataclass
class Streamed:
    """Tensors and bytes that this rank's engine has loaded in one weight sync."""

    tensors: int = 0
    bytes: int = 0


def sync_whole_tensors(actor: TrainBackend, engine: RolloutEngine, check: CheckWeights | None = None) -> Streamed:
    """Wakes the engine with the actor's weights, which ``check`` sees once they are loaded. Collective over all ranks.

    Order of device memory: training-only state is offloaded, the engine's weights are filled, the actor's weights are
    offloaded, and only then is the KV cache allocated. Gathered tensors and cache never need memory at the same time.
    """
    streamed = Streamed()
    actor.offload(keep_parameters=True)
    engine.wake_weights()
    engine.load_weights(_counted(actor.full_tensors(), streamed), check)
    actor.offload()
    engine.wake_cache()
    return streamed


def _counted(tensors: Iterable[tuple[str, Tensor]], streamed: Streamed) -> Iterator[tuple[str, Tensor]]:
    """The tensors, each of which may come once; emptied when the loader asks for the next one, because vLLM's loops
    still refer to it while that one is gathered."""
    seen = set()
    for name, tensor in tensors:
        touch("weight sync")
        assert name not in seen, f"{name} is loaded twice"
        seen.add(name)
        streamed.tensors += 1
        streamed.bytes += tensor.nbytes
        passed = tensor.detach()
        del tensor
        yield name, passed
        passed.data = passed.new_empty(0)

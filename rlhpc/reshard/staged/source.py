"""The trainers' end of a staged weight sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.api import TrainBackend
from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import PeerLost
from rlhpc.core.heartbeat import touch
from rlhpc.reshard.checksum_plan import plan_checksums
from rlhpc.reshard.packing import wire_dtype
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.background import Background
from rlhpc.reshard.staged.job import Announced, StagedJob, WeightLinks, WeightTransfer
from rlhpc.reshard.staged.layout import Message, source_layout
from rlhpc.reshard.staged.staging import StagingMemory, buffer_bytes
from rlhpc.reshard.verify import expected_sums
from rlhpc.sharding.shards import TensorSpec

MEETING_SECONDS = 30.0  # in which an engine that was started again must connect
_PHASE = "waiting for engines to receive weights"


@dataclass(frozen=True)
class _Version:
    """A version in staging memory. ``sums``: the trainers' checksums, None unless it is verified."""

    number: int
    sums: Tensor | None
    engines: frozenset[int] | None = None  # ranks that it is sent to once more; None: all


class WeightSource:
    """Sends versions of the actor's weights to the engines' ranks, from a thread of its own.

    Every rank that trains has one and makes the same calls in the same order. An error of the thread, such as a lost
    rank, is a ReshardError of the next call.
    """

    def __init__(self, actor: TrainBackend, sides: SyncSides, section: ReshardSection, job: StagedJob) -> None:
        """Plans, compares the plan's digest with the other ranks, and connects. Collective over both sides' ranks."""
        self._actor, self._sides, self._section, self._job = actor, sides, section, job
        plan = job.plan(sides, section.bucket_mib)
        self._layout = source_layout(plan, job.rank, job.dtype.itemsize)
        self._engines = sorted({message.peer for bucket in self._layout.sends for message in bucket})
        self._verified = [engine for engine, herald in plan.heralds.items() if herald == job.rank]
        self._checksums = plan_checksums(sides.source, sides.target, job.rank)
        self._staging = StagingMemory(self._layout.size, job.dtype, job.device)
        self._buffer = torch.empty(buffer_bytes(self._layout.sends, at_once=True), dtype=torch.uint8)
        self._links = WeightLinks(job, [*self._engines, *self._verified])
        self._lost: set[int] = set()  # ranks of lost engines
        self._published = 0  # versions so far
        self._newest: _Version | None = None
        self._waiting: _Version | None = None  # not sent yet
        self._closing = False
        self.sent_bytes = 0  # of weights, so far
        self._thread = Background("sending weights", self._send_all)
        self._thread.start()

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Copies the actor's weights into staging memory as ``version``, and begins to send them. Afterwards the actor
        may change.

        Waits until the engines have received the previous version, no longer. Versions increase. Collective over the
        trainers' ranks, in their default process group, if the version is verified.
        """
        self.finish()
        for block in self._layout.blocks:
            touch("weight sync")
            self._staging.put(block, self._actor.view(block.shard))
        sums = self._sums() if self._verifies else None
        if self._job.rank == min(self._sides.source):
            Announced(version, sums is not None).post(self._job.store, self._published)
        self._newest = _Version(version, sums)
        self._begin(self._newest)
        self._published += 1

    def join(self, ranks: Iterable[int], generation: int) -> None:
        """Sends the newest version to an engine that was started again, and later versions too. It has the number
        ``newest_number``. Waits until the engines have received the version."""
        assert self._newest is not None, "no version is published"
        self.finish()
        engines = frozenset(ranks)
        peers = engines & {*self._engines, *self._verified}
        self._lost |= peers
        limits = self._job.limits
        assert limits is not None, "no engine may be lost"
        try:
            self._links.open(peers, generation, replace(limits, meeting=MEETING_SECONDS))
        except PeerLost:  # it is lost again
            return
        self._lost -= peers
        self._begin(replace(self._newest, engines=peers))

    @property
    def newest_number(self) -> int:
        """Number of the newest version in this attempt, from 0."""
        return self._published - 1

    def _begin(self, version: _Version) -> None:
        with self._thread.changed:
            self._waiting = version
            self._thread.changed.notify_all()

    def offload(self) -> None:
        """Moves off the device what the actor does not need between two updates, if the configuration says so."""
        self._actor.offload()

    @property
    def sent(self) -> bool:
        """Whether the engines have received the last published version."""
        self._thread.check()
        return self._waiting is None

    def finish(self) -> None:
        """Waits until the engines have received the last published version."""
        self._thread.check()
        self._thread.wait(lambda: self._waiting is None, _PHASE)

    def close(self) -> None:
        """Finishes and disconnects. For a normal end only: after an error other ranks may not respond."""
        self.finish()
        with self._thread.changed:
            self._closing = True
            self._thread.changed.notify_all()
        self._thread.join()
        self._links.close()

    @property
    def _verifies(self) -> bool:
        every = self._section.verify
        return every == "always" or (isinstance(every, int) and self._published % every == 0)

    def _sums(self) -> Tensor:
        """Checksums of the actor's weights, over all trainers."""
        sums = expected_sums(self._checksums, self._actor.view, self._wire_dtype, self._job.device)
        if len(self._sides.source) > 1:
            dist.all_reduce(sums)
        return sums.cpu()

    def _wire_dtype(self, tensor: TensorSpec) -> torch.dtype:
        return wire_dtype(tensor, self._job.dtype)

    def _send_all(self) -> None:
        """Work of the thread."""
        while True:
            with self._thread.changed:
                self._thread.changed.wait_for(lambda: self._waiting is not None or self._closing)
            if self._waiting is None:
                return
            self._send(self._waiting)
            with self._thread.changed:
                self._waiting = None
                self._thread.changed.notify_all()

    def _send(self, version: _Version) -> None:
        """Sends a version, and waits until the engines have confirmed it."""
        if version.sums is not None:
            for engine in self._peers(self._verified, version):
                self._transfer({engine: partial(self._links.send, engine, version.sums)})
        for number, bucket in enumerate(self._layout.sends):
            packed = self._packed(
                [message for message in bucket if message.peer in self._peers(self._engines, version)]
            )
            self._transfer({m.peer: partial(self._links.send, m.peer, data, number) for m, data in packed})
            self.sent_bytes += sum(message.size for message, _ in packed)
        confirmed = {engine: torch.zeros(1, dtype=torch.int64) for engine in self._peers(self._engines, version)}
        self._transfer({engine: partial(self._links.receive, engine, each) for engine, each in confirmed.items()})
        found = {engine: int(each) for engine, each in confirmed.items() if engine not in self._lost}
        wrong = {engine: each for engine, each in found.items() if each != version.number}
        assert not wrong, f"version {version.number} was received as {wrong}"

    def _peers(self, ranks: Iterable[int], version: _Version) -> list[int]:
        """Those of the ranks that get a version."""
        wanted = version.engines
        return [rank for rank in ranks if rank not in self._lost and (wanted is None or rank in wanted)]

    def _transfer(self, begin: Mapping[int, Callable[[], WeightTransfer]]) -> None:
        """Makes transfers at once, one with each rank. Without an engine that is lost, if the job may lose it."""
        transfers: dict[int, WeightTransfer] = {}
        for peer, start in begin.items():
            with self._may_lose(peer):
                transfers[peer] = start()
        for peer, transfer in transfers.items():
            with self._may_lose(peer):
                transfer.wait()

    @contextlib.contextmanager
    def _may_lose(self, peer: int) -> Iterator[None]:
        try:
            yield
        except PeerLost:
            if self._job.limits is None:
                raise
            engine = peer // self._job.ranks_per_node
            self._lost |= {
                rank for rank in {*self._engines, *self._verified} if rank // self._job.ranks_per_node == engine
            }
            self._links.drop(peer)

    def _packed(self, bucket: Sequence[Message]) -> list[tuple[Message, Tensor]]:
        """The messages of a bucket with their bytes."""
        found, start = [], 0
        for message in bucket:
            size = message.size if message.start is None else 0
            found.append((message, self._staging.packed(message, self._buffer[start : start + size])))
            start += size
        return found

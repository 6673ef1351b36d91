"""The trainers' end of a staged weight sync."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.api import TrainBackend
from rlhpc.config.schema import ReshardSection
from rlhpc.core.heartbeat import touch
from rlhpc.reshard.checksum_plan import plan_checksums
from rlhpc.reshard.packing import wire_dtype
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.background import Background
from rlhpc.reshard.staged.job import Announced, StagedJob, WeightLinks
from rlhpc.reshard.staged.layout import source_layout
from rlhpc.reshard.staged.recipients import Recipients
from rlhpc.reshard.staged.senders import SentCounts, make_sender, peers_of
from rlhpc.reshard.verify import expected_sums
from rlhpc.sharding.shards import TensorSpec

_PHASE = "waiting for engines to receive weights"


@dataclass(frozen=True)
class _Version:
    """A version in staging memory. ``sums``: the trainers' checksums, None unless it is verified."""

    number: int
    sums: Tensor | None
    again: tuple[int, ...] = ()  # ranks that were started again, to which alone it is sent


class WeightSource:
    """Sends versions of the actor's weights to the engines' ranks, from a thread of its own.

    Every rank that trains has one and makes the same calls in the same order. An error of the thread, such as a lost
    rank, is a ReshardError of the next call.
    """

    def __init__(self, actor: TrainBackend, sides: SyncSides, section: ReshardSection, job: StagedJob) -> None:
        """Plans, compares the plan's digest with the other ranks, and connects. Collective over both sides' ranks."""
        self._actor, self._sides, self._section, self._job = actor, sides, section, job
        plan = job.plan(sides, section.bucket_mib, section.delta)
        self._layout = source_layout(plan, job.rank, job.dtype.itemsize)
        self._engines = peers_of(self._layout)
        self._verified = [engine for engine, herald in plan.heralds.items() if herald == job.rank]
        self._checksums = plan_checksums(sides.source, sides.target, job.rank)
        self._links = WeightLinks(job, {*self._engines, *self._verified} - {*job.absent})
        self._recipients = Recipients(job, self._links, {*self._engines, *self._verified})
        self._sender = make_sender(section.delta, self._layout, job, self._links, self._recipients)
        self._published = 0  # versions so far
        self._known, self._taken = SentCounts(), SentCounts()  # sent when the last was published, and reported
        self._newest: _Version | None = None
        self._waiting: _Version | None = None  # not sent yet
        self._closing = False
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
        self._known = replace(self.counts)
        for block in self._layout.blocks:
            touch("weight sync")
            self._sender.staging.put(block, self._actor.view(block.shard))
        sums = self._sums() if self._verifies else None
        if self._job.rank == min(self._sides.source):
            Announced(version, sums is not None).post(self._job.store, self._published)
        self._newest = _Version(version, sums)
        self._begin(self._newest)
        self._published += 1

    def join(self, engine: Collection[int], generation: int) -> None:
        """Sends the newest version to the ranks of an engine that was started again, and later versions too. It has the
        number ``newest_number``. Waits until the other engines have received it."""
        assert self._newest is not None, "no version is published"
        self.finish()
        peers = self._recipients.join(engine, generation)
        if peers:
            self._begin(replace(self._newest, again=tuple(peers)))

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
    def counts(self) -> SentCounts:
        """What this rank has sent so far, of the last published version only when it is ``sent``."""
        return self._sender.counts

    def take_counts(self) -> SentCounts | None:
        """What this rank sent for the versions before the last published one, since the last call. None without deltas,
        and if there are no such versions. It does not depend on how fast the last one is being sent."""
        found, self._taken = self._known.since(self._taken), self._known
        return found if self._section.delta != "off" and found.weights else None

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
        links, recipients, sums = self._links, self._recipients, version.sums
        engines, verified = (
            [rank for rank in ranks if not version.again or rank in version.again]
            for ranks in (self._engines, self._verified)
        )
        if sums is not None:
            recipients.transfer((engine, partial(links.send, engine, sums)) for engine in verified)
        if version.again:
            self._sender.send_again(engines)
        else:
            self._sender.send(version.number)
        confirmed = {engine: torch.zeros(1, dtype=torch.int64) for engine in engines}
        recipients.transfer((engine, partial(links.receive, engine, each)) for engine, each in confirmed.items())
        found = {engine: int(confirmed[engine]) for engine in recipients.present(engines)}
        wrong = {engine: each for engine, each in found.items() if each != version.number}
        assert not wrong, f"version {version.number} was received as {wrong}"

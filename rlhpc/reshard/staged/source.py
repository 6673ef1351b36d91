"""The trainers' end of a staged weight sync, its recipients, and the senders of a version.

A sender sends each message in full, or its changes since the previous version. Recipients may be lost on the way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.api import TrainBackend
from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import PeerLost
from rlhpc.core.heartbeat import touch
from rlhpc.reshard.checksum_plan import plan_checksums
from rlhpc.reshard.executor import wire_dtype
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.delta import GOOD, HEADER_BYTES, NO_BASE, Form, Header, checksum, encode
from rlhpc.reshard.staged.job import Announced, Background, StagedJob, WeightLinks, WeightTransfer
from rlhpc.reshard.staged.layout import Message, SourceLayout, StagingMemory, buffer_bytes, source_layout
from rlhpc.reshard.verify import expected_sums
from rlhpc.sharding.shards import TensorSpec

_LEAST_SECONDS = 1.0
Begin = tuple[int, Callable[[], WeightTransfer]]  # the rank at the other end, and what begins a transfer with it
_PHASE = "waiting for engines to receive weights"


@dataclass
class SentCounts:
    """Counts of what a rank has sent. ``weights``: bytes of the versions' messages; ``full`` and ``delta``: bytes sent
    for them; ``changed``: elements in deltas; ``repaired``: messages sent again in full."""

    weights: int = 0
    full: int = 0
    delta: int = 0
    changed: int = 0
    repaired: int = 0

    @property
    def sent(self) -> int:
        return self.full + self.delta

    def since(self, earlier: SentCounts) -> SentCounts:
        """Counts of what has been sent after that."""
        return SentCounts(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class Sender(Protocol):
    """Sends the version in ``staging``, which the next one is written to after that. ``counts``: since the start."""

    staging: StagingMemory
    counts: SentCounts

    def send(self, version: int) -> None:
        """Sends it to all."""

    def send_again(self, peers: Collection[int]) -> None:
        """Sends the version that was sent last to ranks that have none."""


def make_sender(delta: str, layout: SourceLayout, job: StagedJob, links: WeightLinks, recipients: Recipients) -> Sender:
    """The sender for a value of ``reshard.delta``."""
    if delta == "off":
        return FullSender(layout, job, links, recipients)
    return DeltaSender(layout, job, links, recipients, Form[delta])


class FullSender:
    """Sends all bytes of each version."""

    def __init__(self, layout: SourceLayout, job: StagedJob, links: WeightLinks, recipients: Recipients) -> None:
        self.counts = SentCounts()
        self.staging = StagingMemory(layout.size, job.dtype, job.device)
        self._layout, self._links, self._packing = layout, links, PackingBuffer(layout)
        self._recipients, self._peers = recipients, peers_of(layout)

    def send(self, version: int) -> None:
        """See ``Sender``."""
        self.send_again(self._peers)

    def send_again(self, peers: Collection[int]) -> None:
        """See ``Sender``."""
        wanted = self._recipients.present(peers)
        for number, bucket in enumerate(self._layout.sends):
            packed = self._packing.packed([m for m in bucket if m.peer in wanted], self.staging)
            self._recipients.transfer((m.peer, partial(self._links.send, m.peer, data, number)) for m, data in packed)
            size = sum(message.size for message, _ in packed)
            self.counts.weights += size
            self.counts.full += size


class DeltaSender:
    """Sends what has changed since the last version to each rank that has it, and all bytes to others.

    Each rank states at the beginning which version it has, and answers each message: its own checksums decide whether
    it needs the bytes in full. A second staging memory keeps the last version.
    """

    def __init__(
        self, layout: SourceLayout, job: StagedJob, links: WeightLinks, recipients: Recipients, form: Form
    ) -> None:
        self.counts = SentCounts()
        self.staging, self._last = (StagingMemory(layout.size, job.dtype, job.device) for _ in range(2))
        self._layout, self._links, self._packing, self._form = layout, links, PackingBuffer(layout), form
        self._old = torch.empty(buffer_bytes(layout.sends, at_once=False), dtype=torch.uint8)
        self._last_version: int | None = None
        self._sums: dict[tuple[int, int], int] = {}  # of the last version's messages, by bucket and rank
        self._recipients, self._peers = recipients, peers_of(layout)

    def send(self, version: int) -> None:
        """See ``Sender``."""
        self._send(self.staging, self._peers)
        self.staging, self._last, self._last_version = self._last, self.staging, version

    def send_again(self, peers: Collection[int]) -> None:
        """See ``Sender``."""
        self._send(self._last, peers)

    def _send(self, memory: StagingMemory, peers: Collection[int]) -> None:
        wanted = self._recipients.present(peers)
        stated = {peer: torch.full((1,), NO_BASE) for peer in wanted}
        self._recipients.transfer((peer, partial(self._links.receive, peer, place)) for peer, place in stated.items())
        bases = {peer: int(place) for peer, place in stated.items()}
        for number, bucket in enumerate(self._layout.sends):
            packed = self._packing.packed([message for message in bucket if message.peer in bases], memory)
            self._send_bucket(number, packed, bases)

    def _send_bucket(self, number: int, packed: Sequence[tuple[Message, Tensor]], bases: Mapping[int, int]) -> None:
        """Sends a bucket, and again in full what does not arrive as it should."""
        begins: list[Begin] = []
        for message, data in packed:
            based = bases[message.peer] == self._last_version
            header, payload = self._encoded(number, message, data, based=based)
            begins.append((message.peer, partial(self._links.send, message.peer, header.encoded(), number)))
            if header.size:
                begins.append((message.peer, partial(self._links.send, message.peer, payload, number)))
            self._count(header, message)
        self._recipients.transfer(begins)
        answers = [torch.full((1,), GOOD) for _ in packed]
        self._recipients.transfer(
            (m.peer, partial(self._links.receive, m.peer, answer, number))
            for (m, _), answer in zip(packed, answers, strict=True)
        )
        again = [each for each, answer in zip(packed, answers, strict=True) if int(answer) != GOOD]
        self._recipients.transfer((m.peer, partial(self._links.send, m.peer, data, number)) for m, data in again)
        self.counts.repaired += len(again)
        self.counts.full += sum(message.size for message, _ in again)

    def _encoded(self, number: int, message: Message, data: Tensor, *, based: bool) -> tuple[Header, Tensor]:
        """Header and bytes of a message. ``based``: the rank has the last version."""
        key, result = (number, message.peer), checksum(data.numpy())
        base, self._sums[key] = self._sums.get(key, 0), result
        if based:
            old = self._last.packed(message, self._old[: message.size])
            found = encode(data.numpy(), old.numpy(), self._form)
            if found is not None:
                header = Header(found.form, len(found.payload), found.gaps, found.changed, base, result)
                return header, torch.from_numpy(found.payload)
        return Header(Form.full, message.size, 0, 0, 0, result), data

    def _count(self, header: Header, message: Message) -> None:
        self.counts.weights += message.size
        self.counts.changed += header.changed
        if header.form is Form.full:
            self.counts.full += HEADER_BYTES + header.size
        else:
            self.counts.delta += HEADER_BYTES + header.size


def peers_of(layout: SourceLayout) -> list[int]:
    """The ranks that this one sends weights to."""
    return sorted({message.peer for bucket in layout.sends for message in bucket})


class PackingBuffer:
    """A buffer for the messages of a bucket that are not stored in one piece."""

    def __init__(self, layout: SourceLayout) -> None:
        self.buffer = torch.empty(buffer_bytes(layout.sends, at_once=True), dtype=torch.uint8)

    def packed(self, bucket: Sequence[Message], staging: StagingMemory) -> list[tuple[Message, Tensor]]:
        """The messages with their bytes, until the next call."""
        found, start = [], 0
        for message in bucket:
            size = message.size if message.start is None else 0
            found.append((message, staging.packed(message, self.buffer[start : start + size])))
            start += size
        return found


class Recipients:
    """Ranks that get weights or checksums. Where the job may lose engines (``StagedJob.limits``), transfers with ranks
    of a lost one are left out; else its loss is a PeerLost."""

    def __init__(self, job: StagedJob, links: WeightLinks, ranks: Collection[int]) -> None:
        self._job, self._links, self._ranks = job, links, frozenset(ranks)
        self._lost = self._ranks & {*job.absent}

    def present(self, ranks: Iterable[int]) -> list[int]:
        """Ranks that are not lost."""
        return [rank for rank in ranks if rank not in self._lost]

    def transfer(self, begins: Iterable[Begin]) -> None:
        """Makes transfers at once. Ranks that do not respond are lost together, after one timeout."""
        began, transfers = time.monotonic(), list[tuple[int, WeightTransfer]]()
        for peer, begin in begins:
            if peer not in self._lost:
                with self._may_lose(peer):
                    transfers.append((peer, begin()))
        for peer, transfer in transfers:
            with self._may_lose(peer):
                transfer.wait(self._left(began))

    def join(self, engine: Collection[int], generation: int) -> list[int]:
        """Connects with the ranks of an engine that was started again; returns those that are connected."""
        peers = sorted(self._ranks & {*engine})
        self._lost |= {*peers}
        for peer in peers:
            self._links.drop(peer)
        try:
            self._links.open(peers, generation, self._job.limits)
        except PeerLost:  # it is lost again
            return []
        self._lost -= {*peers}
        return peers

    def _left(self, began: float) -> float | None:
        """Seconds for which a transfer is waited for; those of other ranks have gone on meanwhile."""
        limits = self._job.limits
        if limits is None or limits.silence is None:
            return None
        return max(_LEAST_SECONDS, limits.silence - (time.monotonic() - began))

    @contextlib.contextmanager
    def _may_lose(self, peer: int) -> Iterator[None]:
        try:
            yield
        except PeerLost:
            if self._job.limits is None:
                raise
            size = self._job.ranks_per_node
            self._lost |= {rank for rank in self._ranks if rank // size == peer // size}
            self._links.drop(peer)


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
        """Counts of what this rank has sent so far, of the last published version only when it is ``sent``."""
        return self._sender.counts

    def take_counts(self) -> SentCounts | None:
        """Counts of what this rank sent for the versions before the last published one, since the last call. None
        without deltas, and if there are no such versions. It does not depend on how fast the last one is being sent."""
        found, self._taken = self._known.since(self._taken), self._known
        return found if self._section.delta != "off" and found.weights else None

    @property
    def sent(self) -> bool:
        """True if the engines have received the last published version."""
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

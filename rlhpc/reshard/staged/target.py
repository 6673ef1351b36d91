"""The engines' end of a staged weight sync, and the receivers of a bucket's messages, in full or as deltas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlhpc.api import RolloutEngine
from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import ReshardError
from rlhpc.core.heartbeat import touch
from rlhpc.reshard.checksum_plan import plan_checksums
from rlhpc.reshard.executor import wire_dtype
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.delta import AGAIN, GOOD, NO_BASE, Delta, Form, Header, apply, checksum
from rlhpc.reshard.staged.job import Announced, Background, StagedJob, WeightLinks, finish
from rlhpc.reshard.staged.layout import Message, Messages, StagingMemory, buffer_bytes, target_layout
from rlhpc.reshard.staged.plan import STAGED_VERSIONS
from rlhpc.reshard.verify import differing_from
from rlhpc.sharding.shards import Shard

_log = logging.getLogger(__name__)

_PHASE = "waiting for weights"
_CLOSE_SECONDS = 5.0
_NAMED = 4  # weights that an error names


class Receiver(Protocol):
    """Receives versions, one after the other. ``base``: staging memory that the next version needs as it is."""

    @property
    def base(self) -> StagingMemory | None: ...

    def begin(self) -> None:
        """Begins a version."""

    def receive(self, number: int, staging: StagingMemory) -> None:
        """Receives the messages of a bucket into their places. Raises a ReshardError if they are wrong."""

    def end(self, version: int, staging: StagingMemory) -> None:
        """Ends a version, which is complete in ``staging``."""


def make_receiver(delta: str, messages: Messages, links: WeightLinks) -> Receiver:
    """The receiver for a value of ``reshard.delta``."""
    return FullReceiver(messages, links) if delta == "off" else DeltaReceiver(messages, links)


class FullReceiver:
    """Receives all bytes."""

    base = None

    def __init__(self, messages: Messages, links: WeightLinks) -> None:
        self._messages, self._links = messages, links

    def begin(self) -> None:
        """See ``Receiver``."""

    def receive(self, number: int, staging: StagingMemory) -> None:
        """See ``Receiver``."""
        messages = self._messages[number]
        finish([self._links.receive(message.peer, staging.place(message), number) for message in messages])

    def end(self, version: int, staging: StagingMemory) -> None:
        """See ``Receiver``."""


@dataclass(frozen=True)
class _Base:
    """The last complete version. ``sums``: checksums of its messages, by bucket and rank."""

    version: int
    staging: StagingMemory
    sums: dict[tuple[int, int], int]


class DeltaReceiver:
    """Receives what has changed since the last complete version, which it keeps, and all bytes of the first one.

    The checksums that come with each message decide whether it is right. If not, the trainer sends it in full.
    """

    def __init__(self, messages: Messages, links: WeightLinks) -> None:
        self._messages, self._links = messages, links
        most = max((sum(message.size for message in bucket) for bucket in messages), default=0)
        self.buffer = torch.empty(most, dtype=torch.uint8)
        self._trainers = sorted({message.peer for bucket in messages for message in bucket})
        self._base: _Base | None = None
        self._sums: dict[tuple[int, int], int] = {}  # of the version that arrives

    @property
    def base(self) -> StagingMemory | None:
        return None if self._base is None else self._base.staging

    def begin(self) -> None:
        """See ``Receiver``. States to the trainers which version it has."""
        self._sums = {}
        stated = torch.tensor([NO_BASE if self._base is None else self._base.version])
        finish([self._links.send(trainer, stated) for trainer in self._trainers])

    def receive(self, number: int, staging: StagingMemory) -> None:
        """See ``Receiver``."""
        messages = self._messages[number]
        headers = self._headers(number, messages)
        payloads = self._payloads(number, messages, headers, staging)
        answers, again = [], []
        for message, header, payload in zip(messages, headers, payloads, strict=True):
            good = self._is_right(number, message, header, payload, staging)
            answers.append(self._links.send(message.peer, torch.tensor([GOOD if good else AGAIN]), number))
            if not good:
                again.append((message, header))
        finish(answers)
        if again:
            peers = ", ".join(str(message.peer) for message, _ in again)
            _log.warning("weights of rank %s had a wrong checksum in bucket %d: received again in full", peers, number)
        finish([self._links.receive(message.peer, staging.place(message), number) for message, _ in again])
        for message, header in again:
            if checksum(staging.place(message).numpy()) != header.result:
                raise ReshardError(f"rank {message.peer} sent a bucket of weights twice with a wrong checksum")
        self._sums |= {(number, m.peer): header.result for m, header in zip(messages, headers, strict=True)}

    def end(self, version: int, staging: StagingMemory) -> None:
        """See ``Receiver``."""
        self._base = _Base(version, staging, self._sums)

    def _headers(self, number: int, messages: Sequence[Message]) -> list[Header]:
        places = [Header.empty() for _ in messages]
        finish([self._links.receive(m.peer, place, number) for m, place in zip(messages, places, strict=True)])
        return [Header.decoded(place, message.size) for place, message in zip(places, messages, strict=True)]

    def _payloads(
        self, number: int, messages: Sequence[Message], headers: Sequence[Header], staging: StagingMemory
    ) -> list[Tensor]:
        """Bytes of deltas; full messages in their places."""
        found, start = [], 0
        for message, header in zip(messages, headers, strict=True):
            delta = header.form is not Form.full
            found.append(self.buffer[start : start + header.size] if delta else staging.place(message))
            start += header.size if delta else 0
        ways = zip(messages, found, strict=True)
        finish([self._links.receive(message.peer, place, number) for message, place in ways if len(place)])
        return found

    def _is_right(self, number: int, message: Message, header: Header, payload: Tensor, staging: StagingMemory) -> bool:
        """True if the message's bytes are there, of which a delta's are computed now."""
        place = staging.place(message).numpy()
        if header.form is not Form.full:
            if self._base is None or self._base.sums.get((number, message.peer)) != header.base:
                return False
            np.copyto(place, self._base.staging.place(message).numpy())
            try:
                apply(Delta(header.form, header.gaps, header.changed, payload.numpy()), place)
            except ReshardError:
                return False
        return checksum(place) == header.result


@dataclass(frozen=True)
class _Arrived:
    """A version that can be written. ``sums``: what its checksums must be, None unless it is verified."""

    staging: StagingMemory
    sums: Tensor | None


class WeightTarget:
    """Receives versions of the weights in a thread of its own, and writes them into the engine when asked to.

    Every rank of an engine has one. It keeps at most one complete version beside the one that it is receiving. An error
    of the thread, such as a lost rank, is a ReshardError of the next call for a version that has not arrived.
    """

    def __init__(
        self,
        sides: SyncSides,
        section: ReshardSection,
        job: StagedJob,
        first: int = 0,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Plans, compares the plan's digest with the other ranks, and connects. Collective over both sides' ranks.
        ``first``: number of the first version that it gets, of these trainers; ``check``: called now and then while
        this rank waits, for what it raises."""
        self._job, self._first, self._check = job, first, check
        plan = job.plan(sides, section.bucket_mib, section.delta)
        layout = self._layout = target_layout(plan, job.rank, job.dtype.itemsize)
        self._herald = plan.heralds[job.rank]
        self._trainers = sorted({message.peer for bucket in layout.receives for message in bucket})
        others = {message.peer for messages in (layout.takes, layout.forwards) for each in messages for message in each}
        self._checksums = plan_checksums(sides.source, sides.target, job.rank)
        self._buffer = torch.empty(buffer_bytes(layout.forwards, at_once=False), dtype=torch.uint8)
        self._free = [StagingMemory(layout.size, job.dtype, job.device) for _ in range(STAGED_VERSIONS)]
        self._arrived: dict[int, _Arrived] = {}
        self._closing = False
        self.received_bytes = self.forwarded_bytes = 0  # of weights from trainers, and to ranks of the node, so far
        self._links = WeightLinks(job, [*self._trainers, self._herald, *others])
        self._receiver = make_receiver(section.delta, layout.receives, self._links)
        self._thread = Background("receiving weights", self._receive_all)
        self._thread.start()

    def ready(self, version: int) -> bool:
        """True if ``version`` has arrived and can be written without waiting. Takes microseconds."""
        if version not in self._arrived:
            self._thread.check()
            return False
        return True

    def wait(self, version: int) -> None:
        """Waits until ``version`` has arrived. Drops older ones, which can no longer be written."""
        self._thread.wait(lambda: self._dropped_before(version), _PHASE, self._check)

    @torch.no_grad()
    def write(self, engine: RolloutEngine, version: int) -> None:
        """Writes ``version`` into the engine between ``open_weights`` and ``close_weights``; waits for it if necessary.

        Between two steps; requests may be in flight. The engine's weights are awake, and versions increase. Raises a
        ReshardError that names the weights whose checksums differ from the trainers', if this version is verified
        (``reshard.verify``).
        """
        self.wait(version)
        arrived = self._arrived[version]
        parameters = engine.open_weights(in_flight=True)
        touch("weight sync")
        for block in self._layout.blocks:
            _view(parameters, block.shard).copy_(arrived.staging.get(block), non_blocking=True)
        if self._job.device.type == "cuda":
            torch.cuda.synchronize(self._job.device)
        wrong = self._differing(arrived.sums, parameters) if arrived.sums is not None else []
        engine.close_weights()
        if wrong:
            more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise ReshardError(
                f"weights of version {version} differ from the trainers' on rank {self._job.rank}: "
                f"{', '.join(wrong[:_NAMED])}{more}"
            )
        self._drop([version])

    def close(self) -> None:
        """Stops receiving and disconnects. At a normal end, after the trainers' last version has arrived."""
        with self._thread.changed:
            self._closing = True
            self._thread.changed.notify_all()
        if self._thread.join(_CLOSE_SECONDS):
            self._links.close()

    def _differing(self, sums: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
        """Names of the engine's weights whose checksums are not those of the trainers."""
        return differing_from(
            sums.to(self._job.device),
            self._checksums,
            lambda shard: _view(parameters, shard),
            lambda tensor: wire_dtype(tensor, self._job.dtype),
        )

    def _dropped_before(self, version: int) -> bool:
        """True if the version has arrived; drops older ones, so that it can arrive."""
        self._drop([older for older in list(self._arrived) if older < version])
        return version in self._arrived

    def _drop(self, versions: list[int]) -> None:
        with self._thread.changed:
            self._free += [self._arrived.pop(version).staging for version in versions]
            self._thread.changed.notify_all()

    def _receive_all(self) -> None:
        """Work of the thread."""
        number, store = self._first, self._job.store.clone()
        while not self._closing:
            announced = Announced.read(store, number)
            if announced is None:
                continue
            with self._thread.changed:
                self._thread.changed.wait_for(lambda: self._next() is not None or self._closing)
                staging = self._next()
                if self._closing or staging is None:
                    return
                self._free.remove(staging)
            arrived = _Arrived(staging, self._receive(announced, staging))
            with self._thread.changed:
                self._arrived[announced.version] = arrived
                self._thread.changed.notify_all()
            number += 1

    def _next(self) -> StagingMemory | None:
        """Staging memory for the next version: a free one other than its base, used before if there is one."""
        return next((each for each in reversed(self._free) if each is not self._receiver.base), None)

    def _receive(self, announced: Announced, staging: StagingMemory) -> Tensor | None:
        """Receives a version, forwards it, and confirms it to the trainers. Returns its checksums."""
        sums = torch.zeros(self._checksums.num_slots, dtype=torch.int64) if announced.verified else None
        if sums is not None:
            self._links.receive(self._herald, sums).wait()
        layout, links = self._layout, self._links
        self._receiver.begin()
        for bucket, received in enumerate(layout.receives):
            self._receiver.receive(bucket, staging)
            self.received_bytes += sum(message.size for message in received)
            taken = layout.takes[bucket]
            taking = [links.receive(message.peer, staging.place(message), bucket) for message in taken]
            for message in self._in_turn(layout.forwards[bucket]):
                links.send(message.peer, staging.packed(message, self._buffer[: message.size]), bucket).wait()
                self.forwarded_bytes += message.size
            finish(taking)
        self._receiver.end(announced.version, staging)
        number = torch.tensor([announced.version])
        finish([self._links.send(trainer, number) for trainer in self._trainers])
        return sums

    def _in_turn(self, messages: tuple[Message, ...]) -> list[Message]:
        """Messages to the ranks after this one first, so that not all send to the same."""
        return sorted(messages, key=lambda message: (message.peer < self._job.rank, message.peer))


def _view(parameters: Mapping[str, Tensor], shard: Shard) -> Tensor:
    return parameters[shard.local_name][shard.local_box.slices].view(shard.box.shape)

"""How a trainers' rank sends a version: each message in full, or what has changed in it since the version before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rlhpc.reshard.staged.delta import Form, checksum, encode
from rlhpc.reshard.staged.header import GOOD, HEADER_BYTES, NO_BASE, Header
from rlhpc.reshard.staged.job import StagedJob, WeightLinks
from rlhpc.reshard.staged.layout import Message, SourceLayout
from rlhpc.reshard.staged.recipients import Begin, Recipients
from rlhpc.reshard.staged.staging import StagingMemory, buffer_bytes


@dataclass
class SentCounts:
    """What a rank has sent. ``weights``: bytes of the versions' messages; ``full`` and ``delta``: bytes sent for them;
    ``changed``: elements in deltas; ``repaired``: messages sent again in full."""

    weights: int = 0
    full: int = 0
    delta: int = 0
    changed: int = 0
    repaired: int = 0

    @property
    def sent(self) -> int:
        return self.full + self.delta

    def since(self, earlier: SentCounts) -> SentCounts:
        """What has been sent after that."""
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

"""How an engine's rank receives the messages of a bucket from trainers: in full, or as deltas to the version before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlhpc.core.errors import ReshardError
from rlhpc.reshard.staged.delta import Delta, Form, apply, checksum
from rlhpc.reshard.staged.header import AGAIN, GOOD, NO_BASE, Header
from rlhpc.reshard.staged.job import WeightLinks, finish
from rlhpc.reshard.staged.layout import Message, Messages
from rlhpc.reshard.staged.staging import StagingMemory

_log = logging.getLogger(__name__)


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
        """Whether the message's bytes are there, of which a delta's are computed now."""
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

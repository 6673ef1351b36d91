"""Channels: Python objects between two ranks of different roles, in order, beside the ranks' own work.

Each end has two threads. One sends what ``ObjectChannel.send`` has queued, and a sign of life while there is nothing
to send; the other puts what arrives into an ``Inbox``. Objects are sealed (``rlhpc.parallel.store``) and travel in
messages of bounded size over a pair (``rlhpc.parallel.pairs``). If the other rank ends, the next call in the main
thread raises PeerLost; if it is stopped, that happens after the pair's timeout.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.core.errors import PeerLost
from rlhpc.core.heartbeat import enter
from rlhpc.parallel.pairs import JobGroup, PairLimits, open_pair
from rlhpc.parallel.store import opened, seal

_MESSAGE = 16 << 20  # bytes: those of a large object may take longer than a timeout, those of a message may not
_ALIVE_SECONDS = 30.0  # between signs of life, at most
_END_SECONDS = 30.0  # for the other end's answer to a close
_LOOK_SECONDS = 0.5  # between two heartbeats
_OBJECT, _ALIVE, _END = range(3)  # kinds of headers: two numbers, kind and bytes of the object that follows


class Inbox:
    """Objects that have arrived by the channels that were opened with it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._arrived: deque[tuple[int, Any, int]] = deque()
        self._lost: PeerLost | None = None
        self._gone: dict[ObjectChannel, PeerLost] = {}

    def take(self) -> list[tuple[int, Any]]:
        """All that has arrived since the last call, as (sending rank's number in the job, object), those of one rank in
        order. Does not wait. Raises PeerLost if a rank is lost."""
        with self.changed:
            self._check()
            taken = [(peer, value) for peer, value, _ in self._arrived]
            self._arrived.clear()
            return taken

    def wait(self, seconds: float, phase: str = "waiting for another role") -> bool:
        """Waits until there is something to take; False after ``seconds``, or if an expendable rank is gone. The
        heartbeat shows ``phase``."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while True:
                enter(phase)
                self._check()
                left = deadline - time.monotonic()
                if self._arrived or self._gone or left <= 0:
                    return bool(self._arrived)
                self.changed.wait(min(left, _LOOK_SECONDS))

    def check(self) -> None:
        """Raises PeerLost if a rank is lost."""
        with self.changed:
            self._check()

    def sizes(self) -> tuple[int, int]:
        """Number and bytes of the objects that wait to be taken."""
        with self.changed:
            return len(self._arrived), sum(size for *_, size in self._arrived)

    def put(self, peer: int, value: Any, size: int) -> None:
        """Called by a channel's thread."""
        with self.changed:
            self._arrived.append((peer, value, size))
            self.changed.notify_all()

    def gone(self) -> dict[ObjectChannel, PeerLost]:
        """Expendable channels whose other end was lost since the last call, and how."""
        with self.changed:
            gone, self._gone = self._gone, {}
            return gone

    def lose(self, error: PeerLost, expendable: ObjectChannel | None = None) -> None:
        """Called by a channel's thread. ``expendable``: the channel, if the work goes on without it."""
        with self.changed:
            if expendable is None:
                self._lost = self._lost or error
            else:
                self._gone[expendable] = error
            self.changed.notify_all()

    def _check(self) -> None:
        if self._lost is not None:
            raise PeerLost(str(self._lost)) from self._lost


class ObjectChannel:
    """One end of a channel. ``peer``: the other end's number in the job; ``inbox``: where its objects arrive."""

    def __init__(self, pair: JobGroup, inbox: Inbox, *, expendable: bool = False, silence: float | None = None) -> None:
        """``expendable``: the inbox only notes the loss of the other end; ``silence``: seconds without a sign of life
        after which that end counts this one as lost, by default the pair's timeout."""
        self.peer, self.inbox = next(rank for rank in pair.ranks if rank != pair.mine), inbox
        self._expendable = expendable
        self._pair, self._alive_seconds = pair, min(_ALIVE_SECONDS, (silence or pair.timeout) / 4)
        self._leaving: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._queued, self._sent = 0, 0  # bytes so far
        self._closing = False
        self._theirs_ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(part,), name=f"{pair.name} {what}", daemon=True)
            for what, part in (("sender", self._send_all), ("receiver", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, value: object) -> None:
        """Queues an object, as it is now. Does not wait for the other end. Raises PeerLost if that is lost."""
        self.inbox.check()
        if self._theirs_ended.is_set():
            raise PeerLost(f"rank {self.peer} has closed its end of the channel")
        assert not self._closing, f"send to rank {self.peer} after close"
        content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self._queued += len(content)
        self._leaving.put(content)

    @property
    def backlog(self) -> int:
        """Bytes that have not left yet."""
        return self._queued - self._sent

    def drop(self) -> None:
        """Disconnects at once; the last use."""
        self._closing = True
        self._leaving.put(None)
        self._pair.close()

    def close(self) -> None:
        """Waits until all objects have arrived and the other end has closed, which it does by itself.

        Raises PeerLost if the other rank is lost before.
        """
        if not self._closing:
            self._closing = True
            self._leaving.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            while thread.is_alive():
                enter(f"closing the channel to rank {self.peer}")
                thread.join(_LOOK_SECONDS)
                if not self.backlog and time.monotonic() > deadline:
                    raise PeerLost(f"rank {self.peer} has not closed its end within {_END_SECONDS:g} s")
        self._pair.close()
        if self.backlog or not self._theirs_ended.is_set():
            self.inbox.check()

    def _run(self, part: Any) -> None:
        try:
            part()
        except Exception as error:  # raised in the main thread
            lost = error if isinstance(error, PeerLost) else PeerLost(f"channel to rank {self.peer}: {error}")
            lost.__cause__ = None if lost is error else error
            self._closing = True
            self._leaving.put(None)
            self.inbox.lose(lost, self if self._expendable else None)

    def _send_all(self) -> None:
        while True:
            try:
                content = self._leaving.get(timeout=self._alive_seconds)
            except queue.Empty:
                self._put_header(_ALIVE, 0)
                continue
            if content is None:
                self._put_header(_END, 0)
                return
            whole = torch.frombuffer(bytearray(seal(content)), dtype=torch.uint8)
            self._put_header(_OBJECT, len(whole))
            for message in whole.split(_MESSAGE):
                self._put(message)
            self._sent += len(content)

    def _receive_all(self) -> None:
        header = torch.empty(2, dtype=torch.int64)
        while True:
            self._get(header)
            kind, size = header.tolist()
            if kind == _END:
                break
            if kind == _OBJECT:
                content = torch.empty(size, dtype=torch.uint8)
                for message in content.split(_MESSAGE):
                    self._get(message)
                self.inbox.put(self.peer, pickle.loads(opened(content.numpy().tobytes())), size)
        self._theirs_ended.set()
        if not self._closing:
            self._closing = True
            self._leaving.put(None)

    def _put_header(self, kind: int, size: int) -> None:
        self._put(torch.tensor([kind, size]))

    def _put(self, message: torch.Tensor) -> None:
        self._pair.wait(self._pair.send(message, self.peer))

    def _get(self, message: torch.Tensor) -> None:
        self._pair.wait(self._pair.receive(message, self.peer))


def open_channel(
    store: dist.Store,
    name: str,
    ends: tuple[int, int],
    mine: int,
    inbox: Inbox | None = None,
    *,
    timeout: float | None = None,
) -> ObjectChannel:
    """A channel between two of the job's ranks (``ends``), of which this is ``mine``. Collective over them, in the main
    thread; see ``open_group``. ``inbox``: where its objects arrive, by default one of its own."""
    return ObjectChannel(open_pair(store, f"channel {name}", ends, mine, timeout=timeout), inbox or Inbox())


def open_channel_of_expendable(
    store: dist.Store, name: str, ends: tuple[int, int], mine: int, inbox: Inbox, limits: PairLimits
) -> ObjectChannel:
    """The end of a rank that counts as lost if it is silent for too long (``limits``)."""
    pair = open_pair(store, f"channel {name}", ends, mine, meeting=limits.meeting)
    return ObjectChannel(pair, inbox, silence=limits.silence)


def open_expendable_channel(
    store: dist.Store, name: str, ends: tuple[int, int], mine: int, inbox: Inbox, limits: PairLimits
) -> ObjectChannel:
    """The other end of it, whose inbox only notes the loss (``Inbox.gone``)."""
    pair = open_pair(store, f"channel {name}", ends, mine, timeout=limits.silence, meeting=limits.meeting)
    return ObjectChannel(pair, inbox, expendable=True)

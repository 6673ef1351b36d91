"""Process groups of a few of the job's ranks outside of any world: how ranks of different roles exchange tensors.

They need no default group, and are authenticated as all gloo groups of the process are (``rlhpc.parallel.gloo``). Ranks
open their groups one at a time, in the main thread, in the same order.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlhpc.core.errors import PeerLost
from rlhpc.core.heartbeat import enter
from rlhpc.parallel.store import timeout_seconds
from rlhpc.parallel.waits import leave_out_this_thread

_LOOK = datetime.timedelta(seconds=0.5)  # between two signs of life


@dataclass(frozen=True)
class PairLimits:
    """Seconds after which an operation fails whose peer does not respond (``silence``), and in which all ranks of a
    group must have come (``meeting``); None: as in all groups of the process."""

    silence: float | None = None
    meeting: float | None = None


class Transmission(Protocol):
    """An operation in flight."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: datetime.timedelta = ...) -> object: ...


class JobGroup:
    """An open group. ``ranks``: the job's numbers of its ranks, by which roots and peers are named;
    ``timeout``: seconds after which an operation fails.

    Broadcasts are matched in order: the ranks of a group call them in the same one. Use ``finished`` to poll one;
    gloo's receives cannot be polled, and a wait that ends early would close the connections.
    """

    def __init__(self, name: str, ranks: Sequence[int], mine: int, group: Any, timeout: float) -> None:
        self.name, self.ranks, self.mine, self.timeout, self._group = name, tuple(ranks), mine, timeout, group

    def broadcast(self, tensor: torch.Tensor, root: int) -> Transmission:
        """Begins to copy ``tensor`` of one rank, contiguous, to that of all. It must live until the work is done."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ranks.index(root), 0
        return self._begin(lambda: self._group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transmission:
        """Begins to send a contiguous tensor to one rank."""
        return self._begin(lambda: self._group.send([tensor], self.ranks.index(to), tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transmission:
        """Begins to receive a contiguous tensor from one rank."""
        return self._begin(lambda: self._group.recv([tensor], self.ranks.index(source), tag))

    def wait(self, work: Transmission, seconds: float | None = None) -> None:
        """Waits for the end of a work, by default for the group's timeout. Raises PeerLost if it has failed. Waits of
        other threads than the main one count in no phase of a step."""
        if threading.current_thread() is not threading.main_thread():
            leave_out_this_thread()
        self._begin(work.wait if seconds is None else partial(work.wait, datetime.timedelta(seconds=seconds)))

    def finished(self, work: Transmission) -> bool:
        """True if a broadcast has ended, without waiting. Raises PeerLost if it has failed."""
        if not work.is_completed():
            return False
        self.wait(work)
        return True

    def close(self) -> None:
        """Drops the connections; the other ranks' operations in flight fail. The last use."""
        self._group = None

    def _begin(self, action: Any) -> Any:
        try:
            return action()
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in self.ranks if rank != self.mine)
            raise PeerLost(f"{self.name}: lost rank {others}: {str(error).splitlines()[0]}") from error


def open_group(
    store: dist.Store,
    name: str,
    ranks: Sequence[int],
    mine: int,
    *,
    timeout: float | None = None,
    meeting: float | None = None,
) -> JobGroup:
    """A gloo group of ``ranks`` (the job's numbers) in which this one is ``mine``. Collective over them.

    ``store``: the job's; ``name``: of no other group in the job; ``timeout``: seconds after which an operation fails
    whose peer does not respond, by default as in all groups of the process; ``meeting``: seconds in which all must have
    come, by default the same as in all groups. Raises PeerLost if a rank does not come.
    """
    timeout = timeout_seconds() if timeout is None else timeout
    assert mine in ranks, f"rank {mine} is not of {name}"
    assert len(set(ranks)) == len(ranks) > 1, f"{name}: ranks {list(ranks)}"
    prefixed, rank = dist.PrefixStore(f"group {name}", store.clone()), list(ranks).index(mine)
    _meet(prefixed, name, ranks, mine, timeout_seconds() if meeting is None else meeting)
    limit = datetime.timedelta(seconds=timeout)
    make: Any = dist.distributed_c10d.ProcessGroupGloo  # which join() replaces
    try:
        return JobGroup(name, ranks, mine, make(prefixed, rank, len(ranks), limit), timeout)
    except RuntimeError as error:
        if meeting is None:
            raise
        raise PeerLost(f"{name}: {str(error).splitlines()[0]}") from error


def open_pair(
    store: dist.Store,
    name: str,
    ends: tuple[int, int],
    mine: int,
    *,
    timeout: float | None = None,
    meeting: float | None = None,
) -> JobGroup:
    """A group of two of the job's ranks; see ``open_group``."""
    return open_group(store, name, ends, mine, timeout=timeout, meeting=meeting)


def _meet(store: dist.Store, name: str, ranks: Sequence[int], mine: int, seconds: float) -> None:
    """Waits until all ranks are here: another role may load its models first."""
    store.set(f"here {mine}", "1")
    keys, deadline = [f"here {rank}" for rank in ranks], time.monotonic() + seconds
    while True:
        enter("connecting")
        try:
            store.wait(keys, _LOOK)
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                late = [rank for rank in ranks if not store.check([f"here {rank}"])]
                raise PeerLost(f"{name}: rank {late[:4]} did not come within {seconds:g} s") from None
        else:
            return

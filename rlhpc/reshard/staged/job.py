"""Parts that both ends of a staged weight sync share: the job, connections, exchange, thread, and the plan's agreement.

Trainers and engines have no process group in common. They exchange small values by the job's store.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.core.errors import ReshardError
from rlhpc.core.heartbeat import enter
from rlhpc.parallel.pairs import JobGroup, PairLimits, Transmission, open_pair
from rlhpc.parallel.waits import leave_out_this_thread
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.plan import StagedPlan, plan_staged_sync

MIB = 1 << 20
_LOOK_SECONDS = 2.0  # the store answers as soon as a key is set; each look is a request to it by every rank
_WAKE_SECONDS = 0.5


@dataclass(frozen=True)
class StagedJob:
    """The job as one of its ranks sees it. ``rank``: its number in the job; ``store``: the job's own store;
    ``generation``: how often this rank was started before; ``limits``: of connections with engines that may be lost,
    None if none may. Such an engine is ``ranks_per_node`` ranks, and shares nothing with others; ``absent``: ranks of
    those that join later."""

    rank: int
    ranks_per_node: int
    dtype: torch.dtype
    device: torch.device
    store: dist.Store
    generation: int = 0
    limits: PairLimits | None = None
    absent: Collection[int] = ()

    def plan(self, sides: SyncSides, bucket_mib: int, delta: str = "off") -> StagedPlan:
        """This rank's part of the plan. Raises a ReshardError unless the trainers' first rank has the same one."""
        plan = plan_staged_sync(
            sides,
            ranks_per_node=self.ranks_per_node,
            bucket_bytes=bucket_mib * MIB,
            itemsize=self.dtype.itemsize,
            rank=self.rank,
            delta=delta,
        )
        first = min(sides.source)
        if self.rank == first:
            self.store.set("weights/plan", plan.digest)
        while not arrived(self.store, "weights/plan"):
            enter("waiting for trainers")
        if self.store.get("weights/plan").decode() != plan.digest:
            raise ReshardError(f"rank {self.rank} computed another weight sync plan than rank {first}")
        return plan


@dataclass(frozen=True)
class Announced:
    """A version that trainers send, as their first rank posts it. ``verified``: its checksums come before it."""

    version: int
    verified: bool

    def post(self, store: dist.Store, number: int) -> None:
        """Posts it as the job's ``number``-th version."""
        store.set(_key(number), json.dumps(asdict(self)))

    @classmethod
    def read(cls, store: dist.Store, number: int) -> Announced | None:
        """The ``number``-th version; None if it is not posted in a while."""
        return cls(**json.loads(store.get(_key(number)))) if arrived(store, _key(number)) else None


def arrived(store: dist.Store, key: str) -> bool:
    """True if a key is set, now or in a while."""
    try:
        store.wait([key], datetime.timedelta(seconds=_LOOK_SECONDS))
    except dist.DistStoreError:
        return False
    return True


def _key(number: int) -> str:
    return f"weights/version/{number}"


class WeightLinks:
    """Connections to other ranks, one pair each."""

    def __init__(self, job: StagedJob, peers: Iterable[int]) -> None:
        """Collective over the pairs."""
        self._job, self._pairs = job, dict[int, JobGroup]()
        first = replace(job.limits, meeting=None) if job.limits is not None and not job.generation else job.limits
        self.open(peers, job.generation, first)  # at first ranks wait for one another until their models are there

    def open(self, peers: Iterable[int], generation: int, limits: PairLimits | None) -> None:
        """Connects with further ranks, or once more with ranks that were started again (``generation``). Collective
        over the pairs. All ranks open their pairs in one order, so that none waits in a circle."""
        job, limits = self._job, limits or PairLimits()
        for ends in sorted((min(job.rank, peer), max(job.rank, peer)) for peer in set(peers)):
            peer = ends[0] if ends[1] == job.rank else ends[1]
            self._pairs[peer] = open_pair(
                job.store,
                f"weights {ends[0]} {ends[1]}" + (f" again {generation}" if generation else ""),
                ends,
                job.rank,
                timeout=limits.silence,
                meeting=limits.meeting,
            )

    def drop(self, peer: int) -> None:
        """Disconnects from a rank that is lost."""
        pair = self._pairs.pop(peer, None)
        if pair is not None:
            pair.close()

    def send(self, peer: int, data: Tensor, bucket: int = 0) -> WeightTransfer:
        """Begins to send. The data must stay as it is until the end."""
        pair = self._pairs[peer]
        return WeightTransfer(pair, pair.send(data, peer, self._tag(pair, bucket)))

    def receive(self, peer: int, data: Tensor, bucket: int = 0) -> WeightTransfer:
        """Begins to receive."""
        pair = self._pairs[peer]
        return WeightTransfer(pair, pair.receive(data, peer, self._tag(pair, bucket)))

    def _tag(self, pair: JobGroup, bucket: int) -> int:
        """Gloo takes the network interface by the tag: all that it may use take turns."""
        return bucket + sum(pair.ranks)

    def close(self) -> None:
        """Closes the connections of all pairs."""
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()


@dataclass(frozen=True)
class WeightTransfer:
    """A message in flight."""

    pair: JobGroup
    work: Transmission

    def wait(self, seconds: float | None = None) -> None:
        """Waits for its end, by default for the pair's timeout. Raises PeerLost."""
        self.pair.wait(self.work, seconds)


def finish(transfers: Sequence[WeightTransfer]) -> None:
    """Waits for the end of all."""
    for transfer in transfers:
        transfer.wait()


class StoreExchange:
    """Implements ``rlhpc.reshard.discovered.Exchange`` by the job's store, once for each topic.

    ``ranks``: those of both sides.
    """

    def __init__(self, job: StagedJob, ranks: Sequence[int]) -> None:
        self.rank, self._store, self._ranks = job.rank, job.store, ranks

    def gather(self, topic: str, mine: bytes) -> Mapping[int, bytes]:
        """See ``Exchange``."""
        # A prefix, because torch's stores do not tell an empty value from none.
        self._store.set(_topic_key(topic, self.rank), b"=" + mine)
        found = {}
        for rank in self._ranks:
            while not arrived(self._store, _topic_key(topic, rank)):
                enter(f"waiting for rank {rank}: {topic}")
            found[rank] = bytes(self._store.get(_topic_key(topic, rank)))[1:]
        return found


def _topic_key(topic: str, rank: int) -> str:
    return f"weights/{topic}/{rank}"


class Background:
    """Runs ``work`` in a thread. ``changed``: guards what both threads share, and is notified at the thread's end."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def check(self) -> None:
        """Raises a ReshardError if the thread has failed."""
        if self._error is not None:
            raise ReshardError(f"{self._thread.name}: {self._error}") from self._error

    def wait(self, reached: Callable[[], bool], phase: str, check: Callable[[], object] | None = None) -> None:
        """Waits; not progress, as ``phase``. Raises a ReshardError if the thread fails before ``reached``, and what
        ``check`` raises, which is called now and then."""
        with self.changed:
            while not reached():
                self.check()
                if check is not None:
                    check()
                enter(phase)
                self.changed.wait(_WAKE_SECONDS)

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the thread to end; returns whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        leave_out_this_thread()
        try:
            self._work()
        except BaseException as error:
            self._error = error
        with self.changed:
            self.changed.notify_all()

"""The engines' ranks to which a trainers' rank sends weights. Some may be lost on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from rlhpc.core.errors import PeerLost
from rlhpc.reshard.staged.job import StagedJob, WeightLinks, WeightTransfer

_LEAST_SECONDS = 1.0
Begin = tuple[int, Callable[[], WeightTransfer]]  # the rank at the other end, and what begins a transfer with it


class Recipients:
    """Ranks that get weights or checksums. Where the job may lose engines (``StagedJob.limits``), transfers with ranks
    of a lost one are left out; else its loss is a PeerLost."""

    def __init__(self, job: StagedJob, links: WeightLinks, ranks: Collection[int]) -> None:
        self._job, self._links, self._ranks = job, links, frozenset(ranks)
        self._lost = self._ranks & {*job.absent}

    def present(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that are not lost."""
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

"""Passes small values among the ranks of trainers and engines, which have no process group in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhpc.core.heartbeat import enter
from rlhpc.reshard.staged.job import StagedJob, arrived


class StoreExchange:
    """Implements ``rlhpc.reshard.discovered.Exchange`` by the job's store, once for each topic.

    ``ranks``: those of both sides.
    """

    def __init__(self, job: StagedJob, ranks: Sequence[int]) -> None:
        self.rank, self._store, self._ranks = job.rank, job.store, ranks

    def gather(self, topic: str, mine: bytes) -> Mapping[int, bytes]:
        """See ``Exchange``."""
        # A prefix, because torch's stores do not tell an empty value from none.
        self._store.set(_key(topic, self.rank), b"=" + mine)
        found = {}
        for rank in self._ranks:
            while not arrived(self._store, _key(topic, rank)):
                enter(f"waiting for rank {rank}: {topic}")
            found[rank] = bytes(self._store.get(_key(topic, rank)))[1:]
        return found


def _key(topic: str, rank: int) -> str:
    return f"weights/{topic}/{rank}"

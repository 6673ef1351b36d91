"""The engines' end of a staged weight sync."""

from __future__ import annotations

from rlhpc.api import RolloutEngine
from rlhpc.config.schema import ReshardSection
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.job import StagedJob


class WeightTarget:
    """Receives versions of the weights in a thread of its own, and writes them into the engine when asked to.

    Every rank of an engine has one. It keeps at most one complete version beside the one that it is receiving. An error
    of the thread, such as a lost rank, is a ReshardError of the next call.
    """

    def __init__(self, sides: SyncSides, section: ReshardSection, job: StagedJob) -> None:
        """Plans, compares the plan's digest with the other ranks, and connects. Collective over both sides' ranks."""
        raise NotImplementedError

    def ready(self, version: int) -> bool:
        """Whether ``version`` has arrived and can be written without waiting. Takes microseconds."""
        raise NotImplementedError

    def wait(self, version: int) -> None:
        """Waits until ``version`` has arrived, with heartbeats. Drops older ones, which can no longer be written."""
        raise NotImplementedError

    def write(self, engine: RolloutEngine, version: int) -> None:
        """Writes ``version`` into the engine between ``open_weights`` and ``close_weights``; waits for it if necessary.

        The engine's weights are awake, and versions increase. Raises a ReshardError that names the weights whose
        checksums differ from the trainers', if this version is verified (``reshard.verify``).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stops receiving and disconnects. At a normal end, after the trainers' last version has arrived."""
        raise NotImplementedError

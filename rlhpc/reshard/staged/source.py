"""The trainers' end of a staged weight sync."""

from __future__ import annotations

from rlhpc.api import TrainBackend
from rlhpc.config.schema import ReshardSection
from rlhpc.reshard.sides import SyncSides
from rlhpc.reshard.staged.job import StagedJob


class WeightSource:
    """Sends versions of the actor's weights to the engines' ranks, from a thread of its own.

    Every rank that trains has one and makes the same calls in the same order. An error of the thread, such as a lost
    rank, is a ReshardError of the next call.
    """

    def __init__(self, actor: TrainBackend, sides: SyncSides, section: ReshardSection, job: StagedJob) -> None:
        """Plans, compares the plan's digest with the other ranks, and connects. Collective over both sides' ranks."""
        raise NotImplementedError

    def publish(self, version: int) -> None:
        """Copies the actor's weights into staging memory as ``version``, and begins to send them. Afterwards the actor
        may change.

        Waits until the previous version has been sent, no longer. Versions increase. Collective over the trainers'
        ranks, in their default process group, if the version is verified.
        """
        raise NotImplementedError

    @property
    def sent(self) -> bool:
        """Whether the last published version has been sent."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until the last published version has been sent."""
        raise NotImplementedError

    def close(self) -> None:
        """Finishes and disconnects. For a normal end only: after an error other ranks may not respond."""
        raise NotImplementedError

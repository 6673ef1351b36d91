"""Last collective operations of a rank, as it records them in a hang. Torch-free values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """One operation. ``sequence``: number in its group, equal on all ranks; ``sizes``: shapes of its inputs."""

    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    finished: bool


@dataclass(frozen=True)
class GroupState:
    """A process group on one back end as one of its ranks sees it. ``recent``: last collectives, oldest first.

    ``ranks`` are the job's. ``role``: of these ranks, empty in a job without roles; each role has groups of the same
    names, such as its default group, ``0``.
    """

    group: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    recent: tuple[Collective, ...]
    role: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Key of the group, equal on all of its ranks and of no other group in the job."""
        return f"{self.role}/{self.group}" if self.role else self.group, self.backend

    @property
    def last(self) -> Collective:
        """The newest collective that the rank has called."""
        return self.recent[-1]

    @property
    def pending(self) -> Collective | None:
        """The oldest collective that has not finished on this rank."""
        return next((c for c in self.recent if not c.finished), None)

    def at(self, sequence: int) -> Collective | None:
        """The collective with that number, if it is among the recent ones."""
        return next((c for c in self.recent if c.sequence == sequence), None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GroupState:
        recent = [
            Collective(c["sequence"], c["operation"], tuple(tuple(size) for size in c["sizes"]), c["finished"])
            for c in value["recent"]
        ]
        ranks = tuple(value["ranks"])
        return cls(value["group"], value["description"], value["backend"], ranks, tuple(recent), value["role"])

"""Which ranks of a job train and which generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhpc.config.schema import RunConfig

RoleName = Literal["all", "trainers", "engines"]


@dataclass(frozen=True)
class RoleWorld:
    """A contiguous block of the job's ranks that do the same, in a world of their own."""

    name: RoleName
    first: int  # the job's rank of the world's rank 0
    size: int

    @property
    def ranks(self) -> range:
        """The job's ranks."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class Placement:
    """The roles of a job's ranks: a single one, or trainers first and engines last."""

    roles: tuple[RoleWorld, ...]
    tp: int  # of each engine

    @property
    def separate(self) -> bool:
        """Whether ranks either train or generate."""
        return len(self.roles) > 1

    @property
    def trainers(self) -> RoleWorld:
        """The ranks that train."""
        return self.roles[0]

    @property
    def engines(self) -> RoleWorld:
        """The ranks that generate."""
        return self.roles[-1]

    @property
    def world_size(self) -> int:
        """Number of the job's ranks."""
        return sum(role.size for role in self.roles)

    @property
    def num_engines(self) -> int:
        """Number of engines, which are consecutive blocks of ``tp`` ranks."""
        return self.engines.size // self.tp

    def role_of(self, rank: int) -> RoleWorld:
        """The role of one of the job's ranks."""
        return next(role for role in self.roles if rank in role.ranks)

    def label(self, rank: int) -> str:
        """What one of the job's ranks is, in words: ``trainer`` or ``engine 1``; empty without roles."""
        if not self.separate:
            return ""
        role = self.role_of(rank)
        return "trainer" if role is self.trainers else f"engine {(rank - role.first) // self.tp}"


def engine_ranks(config: RunConfig) -> int | None:
    """Number of ranks that only generate; None if all ranks do both."""
    if config.placement == "colocated" or not config.train.steps:
        return None
    return config.rollout.ranks or (config.rollout.nodes or 0) * config.resources.ranks_per_node


def generating_ranks(config: RunConfig, training_ranks: int) -> int:
    """Number of ranks with an engine in a job of which ``training_ranks`` train."""
    return engine_ranks(config) or training_ranks


def placement_of(config: RunConfig, world_size: int) -> Placement:
    """Placement of a job of ``world_size`` ranks. The config has been checked: both roles have ranks."""
    tp, engines = config.rollout.tp, engine_ranks(config)
    if engines is None:
        return Placement((RoleWorld("all", 0, world_size),), tp)
    assert 0 < engines < world_size, f"{engines} of {world_size} ranks generate"
    first = world_size - engines
    return Placement((RoleWorld("trainers", 0, first), RoleWorld("engines", first, engines)), tp)

"""Roles of a job's ranks, which train or generate, and the training back end of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhpc.models import ModelDescription, ModelShape

if TYPE_CHECKING:
    from rlhpc.config.schema import RunConfig


RoleName = Literal["all", "trainers", "judges", "engines"]
Backend = Literal["megatron", "fsdp"]


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
    """The roles of a job's ranks: a single one, or trainers first, engines last, and judges, if any, between them."""

    roles: tuple[RoleWorld, ...]
    tp: int  # of each engine
    lends: bool = False  # trainers' ranks have engines too
    num_joining: int = 0  # of the last engines, which are in rollout jobs and join after the others have begun

    @property
    def separate(self) -> bool:
        """True if ranks either train or generate."""
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
    def judges(self) -> RoleWorld | None:
        """The ranks of models beside the actor, if they have ranks of their own."""
        return self.roles[1] if len(self.roles) > 2 else None

    @property
    def world_size(self) -> int:
        """Number of the job's ranks."""
        return sum(role.size for role in self.roles)

    @property
    def num_engines(self) -> int:
        """Number of engines, which are consecutive blocks of ``tp`` ranks."""
        return self.engines.size // self.tp

    @property
    def num_lenders(self) -> int:
        """Number of engines of the ranks that train, which are blocks of ``tp`` ranks too."""
        return self.trainers.size // self.tp if self.lends else 0

    @property
    def num_beginning(self) -> int:
        """Number of the engines that begin together with the trainers."""
        return self.num_engines - self.num_joining

    @property
    def beginning_ranks(self) -> range:
        """The job's ranks that begin together: all but those of rollout jobs."""
        return range(self.world_size - self.num_joining * self.tp)

    @property
    def joining_ranks(self) -> range:
        """Ranks of rollout jobs, the last ones."""
        return range(self.beginning_ranks.stop, self.world_size)

    def world_of(self, rank: int, *, elastic: bool) -> RoleWorld:
        """The world of one of the job's ranks: its role, or with ``elastic`` its engine, which may be lost alone."""
        role = self.role_of(rank)
        if not elastic or role.name != "engines":
            return role
        return RoleWorld("engines", self.leader_of(self.engine_of(rank)), self.tp)

    def engine_of(self, rank: int) -> int:
        """The engine of one of the job's ranks, which generates."""
        return (rank - self.engines.first) // self.tp

    def leader_of(self, engine: int) -> int:
        """The job's rank of an engine's first one."""
        return self.engines.first + engine * self.tp

    def role_of(self, rank: int) -> RoleWorld:
        """The role of one of the job's ranks."""
        return next(role for role in self.roles if rank in role.ranks)

    def label(self, rank: int) -> str:
        """Name of one of the job's ranks, in words: ``trainer`` or ``engine 1``; empty without roles."""
        if not self.separate:
            return ""
        role = self.role_of(rank)
        if role.name == "engines":
            return f"engine {self.engine_of(rank)}"
        return "trainer" if role is self.trainers else "judge"


def engine_ranks(config: RunConfig) -> int | None:
    """Number of ranks that only generate; None if all ranks do both."""
    if config.placement == "colocated" or not config.train.steps:
        return None
    return config.rollout.ranks or (config.rollout.nodes or 0) * config.resources.ranks_per_node


def receiving_together(config: RunConfig) -> int:
    """Number of engines' ranks that receive weights over the network once: those of a node, or of each engine where
    engines may be lost one by one."""
    return config.rollout.tp if config.may_lose_engines else config.resources.ranks_per_node


def judge_ranks(config: RunConfig) -> int:
    """Number of ranks of models beside the actor; 0 if they have none of their own."""
    if engine_ranks(config) is None:
        return 0
    return config.judges.ranks or (config.judges.nodes or 0) * config.resources.ranks_per_node


def training_ranks(config: RunConfig, world_size: int) -> int:
    """Number of ranks that train in a job of ``world_size``."""
    return world_size - judge_ranks(config) - (engine_ranks(config) or 0)


def ranks_with(config: RunConfig, on: str, training: int) -> int:
    """Number of ranks of a model that is ``on`` judges, or else on the ``training`` ranks."""
    return judge_ranks(config) if on == "judges" and judge_ranks(config) else training


def generating_ranks(config: RunConfig, training_ranks: int) -> int:
    """Number of ranks with an engine in a job of which ``training_ranks`` train."""
    return engine_ranks(config) or training_ranks


def placement_of(config: RunConfig, world_size: int) -> Placement:
    """Placement of a job of ``world_size`` ranks. The config has been checked: both roles have ranks."""
    tp, engines = config.rollout.tp, engine_ranks(config)
    if engines is None:
        return Placement((RoleWorld("all", 0, world_size),), tp)
    judges = judge_ranks(config)
    assert 0 < engines < world_size - judges, f"{engines} of {world_size} ranks generate, {judges} are judges"
    train = world_size - judges - engines
    roles = [RoleWorld("trainers", 0, train), RoleWorld("engines", world_size - engines, engines)]
    if judges:
        roles.insert(1, RoleWorld("judges", train, judges))
    joining = config.all_rollout_job_nodes * config.resources.ranks_per_node // tp
    return Placement(tuple(roles), tp, lends=config.placement == "lend", num_joining=joining)


def backend_of(config: RunConfig, *, known: bool = True) -> Backend:
    """The back end of all models of a run. ``known``: rlhpc describes the family of the actor's model."""
    if config.train.backend == "auto":
        return "megatron" if known else "fsdp"
    return config.train.backend


def backend_for(config: RunConfig, model: ModelDescription | None) -> Backend:
    """The back end, by the actor's model; for auto without one, which may have yet to be made, megatron."""
    return backend_of(config, known=model is None or isinstance(model, ModelShape))

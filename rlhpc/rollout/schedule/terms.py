"""Constants that a schedule follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhpc.config.rollout import replayed_groups
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError

NANOSECONDS = 1_000_000_000
InFlight = Literal["recompute", "keep", "finish"]
Order = Literal["deterministic", "arrival"]


@dataclass(frozen=True)
class Costs:
    """Virtual times in nanoseconds: of an engine's step, of each of its sequences, of training, of a tool call, and of
    the part of a step in which trainers' ranks generate."""

    step: int
    sequence: int
    train: int
    tool: int = NANOSECONDS
    lend: int = 0

    def __post_init__(self) -> None:
        assert min(self.step, self.sequence, self.tool, self.lend) >= 0, self
        assert self.step + self.sequence > 0 < self.train, f"{self}: the clock must advance"

    @classmethod
    def of_seconds(cls, step: float, sequence: float, train: float, tool: float = 1.0, lend: float = 0.0) -> Costs:
        """The same from seconds."""
        return cls(*(round(seconds * NANOSECONDS) for seconds in (step, sequence, train, tool, lend)))

    def engine_step(self, requests: int) -> int:
        """Virtual time of an engine's step."""
        return self.step + self.sequence * requests


@dataclass(frozen=True)
class Terms:
    """Terms that all engines and the trainers agree on. Equal on all ranks."""

    engines: int
    groups_per_step: int  # new groups that a step trains on
    max_staleness: int
    steps: int  # RL steps of the whole run; its last version
    slots: int  # requests of an engine, from which on it starts no further group
    costs: Costs
    in_flight: InFlight = "recompute"
    filtered: bool = False  # groups may be dropped: each has a verdict
    lenders: int = 0  # engines of the trainers' ranks, which take over requests while these would wait
    batch_limit: int = 0  # groups, kept or not, after which a batch closes although it is not full; 0: no limit
    order: Order = "deterministic"  # of generation: by virtual time, or by what arrives first
    elastic: bool = False  # engines may be lost: the others go on in the order of arrival

    def __post_init__(self) -> None:
        assert min(self.engines, self.groups_per_step, self.slots) > 0 <= min(self.max_staleness, self.steps), self
        assert not self.batch_limit or self.batch_limit >= self.groups_per_step, self

    def engine_of(self, group: int) -> int:
        """The engine that generates a group."""
        return group % self.engines

    def lenders_of(self, engine: int) -> range:
        """The lenders that take over requests of an engine."""
        return range(engine, self.lenders, self.engines)

    @property
    def lend(self) -> int:
        """Virtual time from a version's due time to the earliest start of training on it."""
        return self.costs.lend if self.lenders else 0


def terms_of(config: RunConfig, engines: int, lenders: int = 0) -> Terms:
    """Terms of a run with ``engines`` engines, and ``lenders`` on the trainers' ranks. Its costs must be set: they are
    predicted at submission."""
    train, asynchrony = config.train, config.asynchrony
    replay, dynamic = train.replay, train.dynamic_sampling
    groups = train.prompts_per_step
    if replay is not None:  # as many in every step, also in those before the buffer is full
        groups -= replayed_groups(groups, replay.fraction, replay.capacity)
    return Terms(
        engines=engines,
        groups_per_step=groups,
        max_staleness=asynchrony.max_staleness,
        steps=train.steps,
        slots=config.rollout.sequences,
        costs=_costs_of(config),
        in_flight=asynchrony.in_flight,
        filtered=dynamic is not None,
        lenders=lenders,
        batch_limit=dynamic.max_batches * groups if dynamic is not None else 0,
        order="arrival" if asynchrony.replay is not None else asynchrony.schedule,
        elastic=config.may_lose_engines,
    )


def _costs_of(config: RunConfig) -> Costs:
    where, costs = "asynchrony.costs", config.asynchrony.costs
    step, sequence, train = costs.step_seconds, costs.sequence_seconds, costs.train_seconds
    if step is None or sequence is None or train is None:
        absent = [
            name for name in ("step_seconds", "sequence_seconds", "train_seconds") if getattr(costs, name) is None
        ]
        raise UserError(
            f"{', '.join(absent)} not set", where=where, remedy="set in seconds; `rlhpc plan` predicts values for a GPU"
        )
    lend = costs.lend_seconds or 0.0
    found = [round(seconds * NANOSECONDS) for seconds in (step, sequence, train, costs.tool_seconds, lend)]
    if found[0] + found[1] == 0 or found[2] == 0:
        raise UserError(
            f"step_seconds {step}, sequence_seconds {sequence}, train_seconds {train}: virtual time would stand still",
            where=where,
            remedy="set train_seconds and one of the others to at least 1e-9",
        )
    return Costs(*found)

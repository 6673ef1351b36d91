"""Roles of this rank in a run: a rank of each model, with the sizes of its batches, and of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from rlhpc.api import PackedBatch, RunState, Sample, TrainBackend
from rlhpc.data.collate import unpack
from rlhpc.data.packing import PackPlan, Schedule, pack, sample_costs
from rlhpc.models.flops import forward_terms
from rlhpc.parallel.transfer import SPLIT_BY_DATA, gather_parts
from rlhpc.rollout.requests import share_of
from rlhpc.sharding.layout import MICROBATCH_TOKENS, ParallelLayout
from rlhpc.trainer.backends import Backends

T = TypeVar("T")
PerSample = list[np.ndarray]  # for each sample of the step an array [response]; equal on every rank


@dataclass(frozen=True)
class EngineRank:
    """This rank's place among the engines, which are blocks of ``tp`` ranks."""

    rank: int
    world_size: int
    tp: int

    @property
    def index(self) -> int:
        """Number of the engine that the rank belongs to."""
        return self.rank // self.tp

    @property
    def engines(self) -> int:
        """Number of engines in the job."""
        return self.world_size // self.tp

    @property
    def leads(self) -> bool:
        """True if it is its engine's first rank, which speaks for the others."""
        return self.rank % self.tp == 0

    def own(self, items: int) -> range:
        """The places of those items that its engine handles."""
        return share_of(items, self.engines, self.index)

    def leaders(self, items: int) -> list[int]:
        """For each item the first rank of the engine that handles it."""
        return [engine * self.tp for engine in range(self.engines) for _ in share_of(items, self.engines, engine)]


@dataclass
class Role:
    """A model of the run on this rank, and the maximum tokens per rank of its microbatches, with gradient and without.

    ``router_replay``: it trains on the experts that the engine routed tokens to. ``alone``: the ranks of one copy
    evaluate batches of their own, which other ranks have no part in; ``rank`` is then the place among them.
    """

    model: TrainBackend
    rank: int
    tokens_per_microbatch: int
    tokens_without_gradient: int
    router_replay: bool = False
    alone: bool = False

    @property
    def layout(self) -> ParallelLayout:
        layout = self.model.layout
        return replace(layout, world_size=layout.tp * layout.cp) if self.alone else layout

    @property
    def coord(self) -> dict[str, int]:
        """This rank's place on each axis of the model's layout."""
        return self.layout.coord(self.rank)

    def pack(self, lengths: Sequence[int], minibatches: int = 1, *, gradient: bool = True) -> tuple[PackPlan, ...]:
        """Microbatches bounded by their tokens, which context-parallel ranks share, and balanced by their FLOPs."""
        tokens = self.tokens_per_microbatch if gradient else self.tokens_without_gradient
        linear, quadratic = forward_terms(self.model.shape)
        layout = self.layout
        schedule = Schedule(
            rows=self.model.meets_in_microbatches,
            stages=layout.pp,
            virtual_stages=layout.vpp or 1,
            overhead=linear * MICROBATCH_TOKENS * layout.tp * layout.cp,
        )
        costs = sample_costs(lengths, linear, quadratic)
        return pack(lengths, layout.dp, tokens * layout.cp, minibatches, costs, schedule)

    def own_bins(self, plan: PackPlan) -> tuple[tuple[int, ...], ...]:
        """Sample ids of this rank's microbatches."""
        return plan.bins[SPLIT_BY_DATA.part_of(self.layout, self.rank)]

    def gathered(self, mine: dict[int, T]) -> dict[int, T]:
        """Results of every rank of the model by sample, on each of them. Collective, unless it is alone."""
        parts = [mine] if self.alone else gather_parts(SPLIT_BY_DATA, self.layout, mine)
        return {i: value for part in parts for i, value in part.items()}

    def expert_layers(self, stage: int) -> tuple[int, ...]:
        """The layers with experts on a pipeline rank, by their places among all layers with experts."""
        shape = self.model.shape
        places = self.layout.layer_places(shape.num_layers)
        layers = shape.experts.layers if shape.experts else ()
        return tuple(place for place, layer in enumerate(layers) if places[layer][0] == stage)


class Judges(Protocol):
    """Models beside the actor on ranks of their own. Methods are collective over the ranks that train."""

    models: tuple[str, ...]

    def scores(self, conversations: Sequence[np.ndarray]) -> list[float]:
        """The reward model's score of each conversation's last token; waits for them."""

    def evaluate(self, samples: Sequence[Sample]) -> None:
        """Begins the passes of reference and critic over a step's samples."""

    def values(self) -> dict[str, PerSample]:
        """``reference_log_probs`` and ``old_values`` of the samples given last; waits for them."""

    def train_critic(
        self, state: RunState, samples: Sequence[Sample], old_values: PerSample, returns: PerSample
    ) -> None:
        """Begins the critic's updates of the present step."""


@dataclass
class JudgeModels:
    """The models of a rank of judges, each with its own layout."""

    reference: Role | None = None  # frozen
    critic: Role | None = None
    reward: Role | None = None  # frozen
    judges: Judges | None = None  # see Models: always None
    backends: Backends | None = None

    @property
    def trained(self) -> dict[str, Role]:
        """Those with an optimizer, by name."""
        return {"critic": self.critic} if self.critic is not None else {}

    @property
    def has_critic(self) -> bool:
        return self.critic is not None


@dataclass
class Models:
    """The models of a run on a rank that trains, each with its own layout, and those that are on ``judges``."""

    actor: Role
    reference: Role | None = None  # frozen
    critic: Role | None = None
    reward: Role | None = None  # frozen
    judges: Judges | None = None
    backends: Backends | None = None  # what made them

    @property
    def has_critic(self) -> bool:
        """True if the run has a critic, here or on judges."""
        return self.critic is not None or (self.judges is not None and "critic" in self.judges.models)

    @property
    def read_seconds(self) -> float:
        """Seconds that this rank has spent reading weights and checkpoints of all of them."""
        roles = (self.actor, self.reference, self.critic, self.reward)
        return sum(role.model.read_seconds for role in roles if role is not None)

    def settle(self) -> None:
        """Waits for what updates have left in flight."""
        for role in self.trained.values():
            role.model.settle()

    @property
    def trained(self) -> dict[str, Role]:
        """Those with an optimizer, by name."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})


def of_samples(
    role: Role,
    samples: Sequence[Sample],
    batches: Sequence[PackedBatch],
    evaluate: Callable[[Sequence[PackedBatch]], list[Tensor]],
) -> PerSample:
    """Evaluates this rank's batches, and gives every rank the values of each sample's response tokens. Collective."""
    mine: dict[int, np.ndarray] = {}
    for batch, values in zip(batches, evaluate(batches), strict=True):
        prompts = [samples[i].prompt_len for i in batch.sample_ids]
        mine.update(zip(batch.sample_ids, unpack(batch, values, prompts), strict=True))
    found = role.gathered(mine)
    return [found[i] for i in range(len(samples))]

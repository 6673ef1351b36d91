"""The models of a run in their parts: who is cut how, and in what sizes it takes its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rlhpc.api import PackedBatch, Sample
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.data.collate import unpack
from rlhpc.data.packing import PackPlan, pack, sample_costs
from rlhpc.models.flops import forward_terms
from rlhpc.parallel.transfer import gather_parts
from rlhpc.sharding.dispatch import SPLIT_BY_DATA
from rlhpc.sharding.layout import ParallelLayout

PerSample = list[np.ndarray]  # for each sample of the step an array [response]; equal on every rank


@dataclass(frozen=True)
class Role:
    """A model and the most tokens that a rank takes through it at once, with gradient and without."""

    model: MegatronBackend
    tokens_per_microbatch: int
    tokens_without_gradient: int

    @property
    def layout(self) -> ParallelLayout:
        return self.model.layout

    def pack(self, lengths: Sequence[int], minibatches: int = 1, gradient: bool = True) -> tuple[PackPlan, ...]:
        """Micro batches bounded by their tokens, which context-parallel ranks share, balanced by their arithmetic."""
        tokens = self.tokens_per_microbatch if gradient else self.tokens_without_gradient
        costs = sample_costs(lengths, *forward_terms(self.model.weights.shape))
        return pack(lengths, self.layout.dp, tokens * self.layout.cp, minibatches, costs)

    def own_bins(self, plan: PackPlan, rank: int) -> tuple[tuple[int, ...], ...]:
        """Sample ids of the micro batches that a rank takes through the model."""
        return plan.bins[SPLIT_BY_DATA.part_of(self.layout, rank)]

    def expert_layers(self, stage: int) -> tuple[int, ...]:
        """The layers with experts that a pipeline rank has, by their places among all that have some."""
        shape = self.model.weights.shape
        places = self.layout.layer_places(shape.num_layers)
        layers = shape.experts.layers if shape.experts else ()
        return tuple(place for place, layer in enumerate(layers) if places[layer][0] == stage)


def of_samples(
    role: Role,
    samples: Sequence[Sample],
    batches: Sequence[PackedBatch],
    evaluate: Callable[[Sequence[PackedBatch]], list[Tensor]],
) -> PerSample:
    """What ``evaluate`` says of this rank's batches, token by token, for every sample on every rank. Collective."""
    mine: dict[int, np.ndarray] = {}
    for batch, values in zip(batches, evaluate(batches), strict=True):
        prompts = [samples[i].prompt_len for i in batch.sample_ids]
        mine.update(zip(batch.sample_ids, unpack(batch, values, prompts), strict=True))
    found = {i: value for part in gather_parts(SPLIT_BY_DATA, role.layout, mine) for i, value in part.items()}
    return [found[i] for i in range(len(samples))]

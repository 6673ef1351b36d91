"""From samples to packed batches: the same plan on every rank, then this rank's share as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhpc.algo.losses import shares
from rlhpc.api import PackedBatch, Sample
from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.config.schema import RunConfig, TrainSection
from rlhpc.data.collate import pack_batch, with_kept
from rlhpc.data.packing import PackPlan, shuffled
from rlhpc.data.sft import Example
from rlhpc.trainer.roles import PerSample, Role


@dataclass(frozen=True)
class Batching:
    """Division of a step's samples into minibatches, and the weight of each token."""

    minibatches: int
    aggregation: str
    aggregation_length: int  # tokens that "constant" aggregation divides by, per response
    old_log_probs: bool  # a forward pass of the actor over the samples precedes the step's first update
    epochs: int = 1
    shuffle_seed: int | None = None  # None: the samples have the same order in every epoch

    @classmethod
    def of(cls, config: RunConfig) -> Batching:
        """As configured."""
        section = config.algorithm
        several_updates = config.train.minibatches * config.train.epochs > 1
        return cls(
            config.train.minibatches,
            section.aggregation,
            section.aggregation_length or config.rollout.max_response_tokens,
            several_updates or kl_in_reward(section),
            config.train.epochs,
            config.seed if shuffles(config.train) else None,
        )


@dataclass(frozen=True)
class Minibatch:
    """One optimizer update's data: this rank's microbatches, and the denominator of all ranks' loss sums."""

    batches: tuple[PackedBatch, ...]
    denominator: float


def shuffles(section: TrainSection) -> bool:
    """True if the order of samples is random where it matters: it decides which minibatch a sample is in."""
    return section.shuffle and section.minibatches > 1


def kl_in_reward(section: AlgorithmSection) -> bool:
    """True if the reward has a KL penalty, so that advantages need log-probs."""
    return section.kl.placement == "reward" and section.kl.coefficient > 0


def filled(bins: Sequence[Sequence[int]], make: Callable[[Sequence[int]], PackedBatch]) -> tuple[PackedBatch, ...]:
    """A rank's microbatches; blank ones where it has no samples while others have."""
    batches = [make(ids) for ids in bins if ids]
    return (*batches, *(batches[0].blank(1) for _ in range(len(bins) - len(batches))))


def update_plans(
    role: Role, batching: Batching, samples: Sequence[Sample], step: int
) -> tuple[tuple[PackPlan, ...], ...]:
    """Samples of each rank in RL step ``step`` (from 0): for each epoch a plan for each minibatch.

    The first epoch has the samples in their order, later ones shuffled, equally on every rank and in every layout.
    """
    lengths = [len(sample.tokens) for sample in samples]
    first = role.pack(lengths, batching.minibatches)
    if batching.shuffle_seed is None:
        return (first,) * batching.epochs
    groups, later = [sample.group_id for sample in samples], []
    for epoch in range(1, batching.epochs):
        order = shuffled(groups, batching.shuffle_seed, step, epoch)
        plans = role.pack([lengths[i] for i in order], batching.minibatches)
        later.append(tuple(plan.renumbered(order) for plan in plans))
    return (first, *later)


def forward_plans(role: Role, batching: Batching, samples: Sequence[Sample]) -> tuple[PackPlan, ...]:
    """The same for a pass without gradient.

    With the same token limit its batches are those of the updates, so that rounding is the same too.
    """
    same = role.tokens_per_microbatch == role.tokens_without_gradient
    lengths = [len(sample.tokens) for sample in samples]
    return role.pack(lengths, batching.minibatches if same else 1, gradient=False)


def rl_minibatches(
    role: Role, batching: Batching, samples: Sequence[Sample], tokens: Mapping[str, PerSample], step: int
) -> Iterator[Minibatch]:
    """Packs a step's samples into a role's minibatches, epoch after epoch, with values for each of their tokens."""
    former: tuple[PackPlan, ...] = ()
    minibatches: list[Minibatch] = []
    for plans in update_plans(role, batching, samples, step):
        if plans is not former:
            minibatches = [_minibatch(role, batching, samples, tokens, plan) for plan in plans]
        former = plans
        yield from minibatches


def _minibatch(
    role: Role, batching: Batching, samples: Sequence[Sample], tokens: Mapping[str, PerSample], plan: PackPlan
) -> Minibatch:
    weights, denominator = token_weights(batching, plan, samples)
    make = functools.partial(packed, role, samples, weights, tokens)
    return Minibatch(filled(role.own_bins(plan), make), denominator)


def forward_batches(role: Role, batching: Batching, samples: Sequence[Sample]) -> list[PackedBatch]:
    """This rank's batches for a pass without gradient."""
    batches: list[PackedBatch] = []
    for plan in forward_plans(role, batching, samples):
        weights, _ = token_weights(batching, plan, samples)
        make = functools.partial(packed, role, samples, weights, {})
        batches += filled(role.own_bins(plan), make)
    return batches


def sft_minibatch(role: Role, examples: Sequence[Example]) -> Minibatch:
    """Packs supervised examples; the loss is a mean over their trained tokens."""
    (plan,) = role.pack([len(example.tokens) for example in examples])

    def batch(ids: Sequence[int]) -> PackedBatch:
        rows = [examples[i] for i in ids]
        return pack_batch(
            [(row.tokens, row.prompt_len) for row in rows],
            sample_ids=ids,
            response_mask=[row.trained for row in rows],
        )

    return Minibatch(filled(role.own_bins(plan), batch), float(sum(int(example.trained.sum()) for example in examples)))


def token_weights(batching: Batching, plan: PackPlan, samples: Sequence[Sample]) -> tuple[dict[int, float], float]:
    """The loss weight of a token of each of the plan's samples, and the denominator of the sum over all."""
    ids = [i for bins in plan.bins for bin_ids in bins for i in bin_ids]
    lengths = [samples[i].trained_len for i in ids]
    share = shares(lengths, batching.aggregation, batching.aggregation_length)
    return dict(zip(ids, share.weights, strict=True)), share.denominator


def packed(
    role: Role,
    samples: Sequence[Sample],
    weights: Mapping[int, float],
    tokens: Mapping[str, PerSample],
    ids: Sequence[int],
) -> PackedBatch:
    """One microbatch of the samples ``ids``. Routed experts are the actor's; other models route by themselves."""
    batch = pack_batch(
        [(samples[i].tokens, samples[i].prompt_len) for i in ids],
        sample_ids=ids,
        weights=[weights[i] for i in ids],
        response_mask=[samples[i].response_mask for i in ids],
        per_token={name: [values[i] for i in ids] for name, values in tokens.items()},
        routed_experts=[samples[i].routed_experts for i in ids] if role.router_replay else None,
    )
    batch = with_kept(batch, [samples[i].kept for i in ids], [samples[i].prompt_len for i in ids])
    return replace(batch, routed_layers=role.expert_layers(role.coord["pp"]) if role.router_replay else None)

"""From samples to packed batches: the same plan on every rank, then this rank's share as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhpc.algo.aggregation import shares
from rlhpc.api import PackedBatch, Sample
from rlhpc.data.collate import pack_batch
from rlhpc.data.packing import PackPlan
from rlhpc.parallel.transfer import gather_objects
from rlhpc.trainer.build import Run
from rlhpc.trainer.roles import PerSample, Role


@dataclass(frozen=True)
class Minibatch:
    """One optimizer update's data: this rank's packed micro batches, and what all ranks' losses are divided by."""

    batches: tuple[PackedBatch, ...]
    denominator: float


def exchange_samples(run: Run, samples: list[Sample]) -> list[Sample]:
    """Every engine's samples on every rank, in the order of the step's prompts."""
    return [sample for part in gather_objects(samples if run.leads_engine else None) for sample in part or ()]


def filled(bins: Sequence[Sequence[int]], make: Callable[[Sequence[int]], PackedBatch]) -> tuple[PackedBatch, ...]:
    """A rank's micro batches; blank ones where it has no samples while others have."""
    batches = [make(ids) for ids in bins if ids]
    return (*batches, *(batches[0].blank(1) for _ in range(len(bins) - len(batches))))


def update_plans(run: Run, role: Role, samples: Sequence[Sample]) -> tuple[PackPlan, ...]:
    """Who takes which samples through a role's updates: a plan for each minibatch."""
    return role.pack([len(sample.tokens) for sample in samples], run.config.train.minibatches)


def passing_plans(run: Run, role: Role, samples: Sequence[Sample]) -> tuple[PackPlan, ...]:
    """The same of a pass without gradient.

    Where its bound on tokens is the same, its batches are those of the updates, of which rounding then is the same too.
    """
    same = role.tokens_per_microbatch == role.tokens_without_gradient
    lengths = [len(sample.tokens) for sample in samples]
    return role.pack(lengths, run.config.train.minibatches if same else 1, gradient=False)


def rl_minibatches(run: Run, role: Role, samples: Sequence[Sample], tokens: Mapping[str, PerSample]) -> list[Minibatch]:
    """Pack a step's samples into a role's minibatches, with values for each of their tokens."""
    minibatches = []
    for plan in update_plans(run, role, samples):
        weights, denominator = _weights(run, plan, samples)
        make = functools.partial(_pack, run, role, samples, weights, tokens)
        minibatches.append(Minibatch(filled(role.own_bins(plan, run.info.rank), make), denominator))
    return minibatches


def passing_batches(run: Run, role: Role, samples: Sequence[Sample]) -> list[PackedBatch]:
    """This rank's batches for a pass without gradient."""
    batches = []
    for plan in passing_plans(run, role, samples):
        weights, _ = _weights(run, plan, samples)
        make = functools.partial(_pack, run, role, samples, weights, {})
        batches += filled(role.own_bins(plan, run.info.rank), make)
    return batches


def sft_minibatch(run: Run, sequences: Sequence[tuple[np.ndarray, int]]) -> Minibatch:
    """Pack supervised (tokens, prompt length) sequences; the loss is a mean over response tokens."""
    (plan,) = run.models.actor.pack([len(tokens) for tokens, _ in sequences])
    batches = filled(
        run.models.actor.own_bins(plan, run.info.rank),
        lambda ids: pack_batch([sequences[i] for i in ids], sample_ids=ids),
    )
    return Minibatch(batches, float(sum(len(tokens) - prompt_len for tokens, prompt_len in sequences)))


def _weights(run: Run, plan: PackPlan, samples: Sequence[Sample]) -> tuple[dict[int, float], float]:
    """What a token of each of the plan's samples weighs, and what the sum over all is divided by."""
    section = run.config.algorithm
    ids = [i for bins in plan.bins for bin_ids in bins for i in bin_ids]
    constant = section.aggregation_length or run.config.rollout.max_response_tokens
    share = shares([samples[i].chosen_len for i in ids], section.aggregation, constant)
    return dict(zip(ids, share.weights, strict=True)), share.denominator


def _pack(
    run: Run,
    role: Role,
    samples: Sequence[Sample],
    weights: Mapping[int, float],
    tokens: Mapping[str, PerSample],
    ids: Sequence[int],
) -> PackedBatch:
    # Routed experts were the actor's choices; other models make their own.
    replays = run.config.actor.moe.router_replay and role.model is run.actor
    batch = pack_batch(
        [(samples[i].tokens, samples[i].prompt_len) for i in ids],
        sample_ids=ids,
        weights=[weights[i] for i in ids],
        response_mask=[samples[i].response_mask for i in ids],
        per_token={name: [values[i] for i in ids] for name, values in tokens.items()},
        routed_experts=[samples[i].routed_experts for i in ids] if replays else None,
    )
    layers = role.expert_layers(role.layout.coord(run.info.rank)["pp"]) if replays else None
    return replace(batch, routed_layers=layers)

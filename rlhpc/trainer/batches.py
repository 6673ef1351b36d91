"""From samples to packed batches: the same plan on every rank, then this rank's share as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from rlhpc.algo.aggregation import shares
from rlhpc.api import PackedBatch, Sample
from rlhpc.data.collate import pack_batch
from rlhpc.plan.packing import PackPlan
from rlhpc.trainer.build import Run
from rlhpc.trainer.roles import PerSample, Role


@dataclass(frozen=True)
class Minibatch:
    """One optimizer update's data: this rank's packed micro batches, and what all ranks' losses are divided by."""

    batches: tuple[PackedBatch, ...]
    denominator: float


def exchange_samples(run: Run, samples: list[Sample]) -> list[Sample]:
    """Every engine's samples on every rank, in the order of the step's prompts."""
    parts: list[list[Sample]] = [[] for _ in range(run.layout.world_size)]
    dist.all_gather_object(parts, samples if run.leads_engine else [])
    return [sample for part in parts for sample in part]


def rl_minibatches(run: Run, role: Role, samples: Sequence[Sample], tokens: Mapping[str, PerSample]) -> list[Minibatch]:
    """Pack a step's samples into a role's minibatches, with values for each of their tokens."""
    plans = role.pack([len(sample.tokens) for sample in samples], run.config.train.minibatches)
    minibatches = []
    for plan in plans:
        weights, denominator = _weights(run, plan, samples)
        bins = role.own_bins(plan, run.info.rank)
        batches = tuple(_pack(run, role, bin_ids, samples, weights, tokens) for bin_ids in bins)
        minibatches.append(Minibatch(batches, denominator))
    return minibatches


def passing_batches(run: Run, role: Role, samples: Sequence[Sample]) -> list[PackedBatch]:
    """This rank's batches for a pass without gradient.

    Where its bound on tokens is the same, they are those of the updates, of which rounding then is the same too.
    """
    same = role.tokens_per_microbatch == role.tokens_without_gradient
    lengths = [len(sample.tokens) for sample in samples]
    plans = role.pack(lengths, run.config.train.minibatches if same else 1, gradient=False)
    batches = []
    for plan in plans:
        weights, _ = _weights(run, plan, samples)
        batches += [_pack(run, role, bin_ids, samples, weights, {}) for bin_ids in role.own_bins(plan, run.info.rank)]
    return batches


def sft_minibatch(run: Run, sequences: Sequence[tuple[np.ndarray, int]]) -> Minibatch:
    """Pack supervised (tokens, prompt length) sequences; the loss is a mean over response tokens."""
    (plan,) = run.models.actor.pack([len(tokens) for tokens, _ in sequences])
    bins = run.models.actor.own_bins(plan, run.info.rank)
    batches = tuple(pack_batch([sequences[i] for i in bin_ids], sample_ids=bin_ids) for bin_ids in bins)
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
    ids: Sequence[int],
    samples: Sequence[Sample],
    weights: Mapping[int, float],
    tokens: Mapping[str, PerSample],
) -> PackedBatch:
    # Routes were the actor's choices; other models make their own.
    replays = run.config.train.experts.replay_routes and role.model is run.actor
    return pack_batch(
        [(samples[i].tokens, samples[i].prompt_len) for i in ids],
        sample_ids=ids,
        weights=[weights[i] for i in ids],
        chosen=[samples[i].chosen for i in ids],
        per_token={name: [values[i] for i in ids] for name, values in tokens.items()},
        routes=[samples[i].routes for i in ids] if replays else None,
    )

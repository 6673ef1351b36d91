"""From samples to packed batches: the same plan on every rank, then this rank's share as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from rlhpc.algo.aggregation import shares
from rlhpc.api import PackedBatch, Sample
from rlhpc.data.collate import pack_batch
from rlhpc.plan.flops import forward_terms
from rlhpc.plan.packing import PackPlan, pack, sample_costs
from rlhpc.trainer.build import Run


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


def rl_minibatches(run: Run, samples: Sequence[Sample]) -> list[Minibatch]:
    """Pack a step's samples into its minibatches, with the engine's log-probs of each token."""
    train, section = run.config.train, run.config.algorithm
    plans = _pack(run, [len(sample.tokens) for sample in samples], train.minibatches)
    constant = section.aggregation_length or run.config.rollout.max_response_tokens
    minibatches = []
    for plan in plans:
        ids = _sample_ids(plan)
        share = shares([samples[i].response_len for i in ids], section.aggregation, constant)
        weights = dict(zip(ids, share.weights, strict=True))
        batches = tuple(
            pack_batch(
                [(samples[i].tokens, samples[i].prompt_len) for i in bin_ids],
                sample_ids=bin_ids,
                weights=[weights[i] for i in bin_ids],
                per_token={"engine_log_probs": [samples[i].log_probs for i in bin_ids]},
                routes=[samples[i].routes for i in bin_ids] if train.experts.replay_routes else None,
            )
            for bin_ids in _my_bins(run, plan)
        )
        minibatches.append(Minibatch(batches, share.denominator))
    return minibatches


def sft_minibatch(run: Run, sequences: Sequence[tuple[np.ndarray, int]]) -> Minibatch:
    """Pack supervised (tokens, prompt length) sequences; the loss is a mean over response tokens."""
    lengths = [len(tokens) for tokens, _ in sequences]
    (plan,) = _pack(run, lengths)
    batches = tuple(pack_batch([sequences[i] for i in bin_ids], sample_ids=bin_ids) for bin_ids in _my_bins(run, plan))
    return Minibatch(batches, float(sum(len(tokens) - prompt_len for tokens, prompt_len in sequences)))


def _pack(run: Run, lengths: Sequence[int], minibatches: int = 1) -> tuple[PackPlan, ...]:
    """Micro batches bounded by their tokens, which context-parallel ranks share, and balanced by their arithmetic."""
    capacity = run.config.train.tokens_per_microbatch * run.layout.cp
    return pack(lengths, run.layout.dp, capacity, minibatches, sample_costs(lengths, *forward_terms(run.shape)))


def _my_bins(run: Run, plan: PackPlan) -> tuple[tuple[int, ...], ...]:
    return plan.bins[run.layout.coord(run.info.rank)["dp"]]


def _sample_ids(plan: PackPlan) -> list[int]:
    return [i for bins in plan.bins for bin_ids in bins for i in bin_ids]

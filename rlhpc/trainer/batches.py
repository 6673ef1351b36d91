"""From samples to packed batches: the same plan on every rank, then this rank's share as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from rlhpc.api import PackedBatch, Sample
from rlhpc.data.collate import pack_batch
from rlhpc.plan.packing import PackPlan, pack
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


def rl_minibatches(run: Run, samples: Sequence[Sample], advantages: Sequence[float]) -> list[Minibatch]:
    """Pack a step's samples into its minibatches; per token: advantages and the engine's log-probs."""
    train, mean_of_sequences = run.config.train, run.config.algorithm.aggregation == "sequence-mean"
    plans = pack([len(s.tokens) for s in samples], run.layout.dp, _capacity(run), train.minibatches)
    minibatches = []
    for plan in plans:
        ids = _sample_ids(plan)
        denominator = len(ids) if mean_of_sequences else sum(samples[i].response_len for i in ids)
        batches = tuple(
            pack_batch(
                [(samples[i].tokens, samples[i].prompt_len) for i in bin_ids],
                sample_ids=bin_ids,
                weights=[1.0 / samples[i].response_len if mean_of_sequences else 1.0 for i in bin_ids],
                per_token={
                    "engine_log_probs": [samples[i].log_probs for i in bin_ids],
                    "advantages": [_spread(advantages[i], samples[i].response_len) for i in bin_ids],
                },
                routes=[samples[i].routes for i in bin_ids] if train.experts.replay_routes else None,
            )
            for bin_ids in _my_bins(run, plan)
        )
        minibatches.append(Minibatch(batches, float(denominator)))
    return minibatches


def sft_minibatch(run: Run, sequences: Sequence[tuple[np.ndarray, int]]) -> Minibatch:
    """Pack supervised (tokens, prompt length) sequences; the loss is a mean over response tokens."""
    lengths = [len(tokens) for tokens, _ in sequences]
    (plan,) = pack(lengths, run.layout.dp, _capacity(run))
    batches = tuple(pack_batch([sequences[i] for i in bin_ids], sample_ids=bin_ids) for bin_ids in _my_bins(run, plan))
    return Minibatch(batches, float(sum(len(tokens) - prompt_len for tokens, prompt_len in sequences)))


def _capacity(run: Run) -> int:
    """Most tokens of a micro batch: context-parallel ranks share it."""
    return run.config.train.tokens_per_microbatch * run.layout.cp


def _my_bins(run: Run, plan: PackPlan) -> tuple[tuple[int, ...], ...]:
    return plan.bins[run.layout.coord(run.info.rank)["dp"]]


def _sample_ids(plan: PackPlan) -> list[int]:
    return [i for bins in plan.bins for bin_ids in bins for i in bin_ids]


def _spread(value: float, length: int) -> np.ndarray:
    return np.full(length, value, dtype=np.float32)

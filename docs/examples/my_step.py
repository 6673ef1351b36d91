"""Rejection-sampling fine-tuning (Yuan et al. 2023, arXiv 2308.01825): supervised updates on the step's own responses
that earn the full reward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhpc.api import RunState, Sample
from rlhpc.observe.metrics import Stopwatch
from rlhpc.trainer.run import Run
from rlhpc.trainer.step import generate, sample_metrics
from rlhpc.trainer.update import Metrics, sft_loss


def masked(sample: Sample) -> Sample:
    """The sample without a token to train on, unless it has the full reward."""
    mask = np.zeros(sample.response_len, dtype=bool)
    return sample if sample.reward >= 1 else replace(sample, response_mask=mask)


def step(run: Run, state: RunState) -> tuple[Metrics, list[Sample]]:
    """Generates responses, keeps the correct ones, and fine-tunes the actor on them."""
    clock = Stopwatch()
    batch = generate(run, state, clock)
    samples = [masked(sample) for sample in batch.samples]
    correct = sum(sample.reward >= 1 for sample in batch.samples)
    metrics: Metrics = {"correct": float(correct)}
    if correct:
        with clock("update"):
            metrics |= run.updater.update("actor", state, samples, {}, sft_loss)
        metrics |= sample_metrics(samples)
    return {**metrics, **batch.metrics, **clock.metrics()}, samples

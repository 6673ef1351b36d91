"""One step, read from top to bottom as a single program. Every rank runs it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rlhpc.algo.losses import negative_log_likelihood
from rlhpc.algo.schedule import learning_rate
from rlhpc.api import LossSums, PackedBatch, RunState, Sample, TokenStats, TrainBackend
from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.observe.metrics import Stopwatch
from rlhpc.trainer.batches import Minibatch, exchange_samples, rl_minibatches, sft_minibatch
from rlhpc.trainer.build import Run
from rlhpc.trainer.rollout import generate_samples

Metrics = dict[str, float]


def sft_step(run: Run, state: RunState) -> Metrics:
    """One supervised update."""
    section = run.config.sft
    touch("supervised step", state.sft_step + 1)
    sequences, state.sft_cursor = run.sft.take(state.sft_cursor, section.sequences_per_step, run.config.seed)
    minibatch = sft_minibatch(run, sequences)
    rate = learning_rate(section.optimizer, state.sft_step, section.steps)
    stats = run.actor.train(minibatch.batches, _sft_loss, minibatch.denominator, temperature=1.0, rate=rate)
    state.sft_step += 1
    return {
        **stats.gauges,
        "loss": stats.sums["loss"] / minibatch.denominator,
        "gradient_norm": stats.gradient_norm,
        "learning_rate": rate,
        "tokens": minibatch.denominator,
    }


def rl_step(run: Run, state: RunState) -> tuple[Metrics, list[Sample]]:
    """One step of RL: generate with the present weights, score, and learn from it."""
    clock = Stopwatch()
    prompts, state.prompt_cursor = run.prompts.take(
        state.prompt_cursor, run.config.train.prompts_per_step, run.config.seed
    )
    step = state.step + 1
    touch("push", step)
    with clock("push"):
        run.weights.push()
        state.weights_version = run.weights.weights_version
    touch("rollout", step)
    with clock("rollout"):
        section = run.config.rollout
        samples = exchange_samples(
            run, generate_samples(run, state, prompts, section.samples_per_prompt, section.temperature)
        )
        run.weights.sleep()
    with clock("prepare"):
        advantages = _advantages(run, samples)
        minibatches = rl_minibatches(run, samples, advantages)
    touch("log_probs", step)
    with clock("log_probs"):
        minibatches = _attach_log_probs(run, minibatches)
    touch("update", step)
    with clock("update"):
        metrics = _update(run, state, minibatches)
    _check_gap(run, metrics["engine_gap_mean"], step)
    state.step += 1
    return {**metrics, **_sample_metrics(samples, advantages), **clock.metrics()}, samples


def _advantages(run: Run, samples: Sequence[Sample]) -> list[float]:
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = torch.tensor([sample.group_id for sample in samples])
    return run.algorithm.advantage(rewards, groups, run.config.algorithm).tolist()


def _attach_log_probs(run: Run, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
    """Add the log-probs that the loss compares with: before the step's first update, and under the reference model.

    With a single update a step the former are the ones of that update itself, and need no pass of their own.
    """
    attached = list(minibatches)
    if run.config.train.minibatches * run.config.train.epochs > 1:
        attached = [_with_log_probs(run, minibatch, run.actor, "old_log_probs") for minibatch in attached]
    if run.reference is not None:
        attached = [_with_log_probs(run, minibatch, run.reference, "reference_log_probs") for minibatch in attached]
        run.reference.offload()
    return attached


def _with_log_probs(run: Run, minibatch: Minibatch, model: TrainBackend, name: str) -> Minibatch:
    # Routes were the actor's choices; a reference model makes its own.
    asked = [batch if model is run.actor else replace(batch, routes=None) for batch in minibatch.batches]
    stats = model.log_probs(asked, run.config.rollout.temperature)
    batches = [batch.with_extra(name, s.log_probs) for batch, s in zip(minibatch.batches, stats, strict=True)]
    return Minibatch(tuple(batches), minibatch.denominator)


def _update(run: Run, state: RunState, minibatches: Sequence[Minibatch]) -> Metrics:
    """Epochs times minibatches optimizer updates; metrics are means over the step's updates."""
    section = run.config.train
    rate = learning_rate(section.optimizer, state.step, section.steps)
    loss = functools.partial(_policy_loss, run=run)
    totals: Metrics = {}
    updates = [minibatch for _ in range(section.epochs) for minibatch in minibatches]
    for minibatch in updates:
        stats = run.actor.train(minibatch.batches, loss, minibatch.denominator, run.config.rollout.temperature, rate)
        sums = {name: value / minibatch.denominator for name, value in stats.sums.items() if "/" not in name}
        for name, value in {**sums, **stats.gauges, "gradient_norm": stats.gradient_norm}.items():
            totals[name] = totals.get(name, 0.0) + value / len(updates)
        for name, value in stats.sums.items():
            if name.startswith("max/"):
                totals[name.removeprefix("max/")] = max(totals.get(name.removeprefix("max/"), value), value)
    return {**totals, "learning_rate": rate}


def _check_gap(run: Run, gap: float, step: int) -> None:
    """Engine and trainer gave the same tokens the same log-probs, up to rounding; equal on every rank."""
    limit = run.config.reshard.max_engine_gap
    if limit is not None and not gap <= limit:
        raise UserError(
            f"in step {step} the engine's log-probs differ from the trainer's by {gap:.3g} on average",
            where="reshard.max_engine_gap",
            remedy=f"set reshard.verify to always to see whether it is the weights, or raise the limit of {limit:g}",
        )


def _policy_loss(stats: TokenStats, batch: PackedBatch, run: Run) -> LossSums:
    """The algorithm's loss on one packed batch, and how far the engine's log-probs are from the trainer's."""
    before = batch.extra.get("old_log_probs", stats.log_probs.detach())
    tokens = {
        **batch.extra,
        "log_probs": stats.log_probs,
        "entropy": stats.entropy,
        "old_log_probs": before,
        "weight": batch.loss_weight,
    }
    sums = run.algorithm.loss(tokens, run.config.algorithm)
    gap = (before - batch.extra["engine_log_probs"]).abs()
    metrics = {name: value.detach() for name, value in sums.items()}
    metrics["engine_gap_mean"] = (gap * batch.loss_weight).sum()
    metrics["max/engine_gap_max"] = gap.max()
    return LossSums(sums["loss"], metrics)


def _sft_loss(stats: TokenStats, batch: PackedBatch) -> LossSums:
    loss = negative_log_likelihood(stats.log_probs, batch.loss_weight)
    return LossSums(loss, {"loss": loss.detach()})


def _sample_metrics(samples: Sequence[Sample], advantages: Sequence[float]) -> Metrics:
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.response_len for sample in samples])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "advantage/zero_fraction": float((np.array(advantages) == 0).mean()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
        "rollout/completion_tokens": float(lengths.sum()),
        "tokens": float(sum(len(sample.tokens) for sample in samples)),
    }

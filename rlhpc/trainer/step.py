"""One step, read from top to bottom as a single program. Every rank runs it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlhpc.algo.kl import adapted_coefficient, with_coefficient
from rlhpc.algo.losses import negative_log_likelihood
from rlhpc.algo.schedule import learning_rate
from rlhpc.api import LossSums, PackedBatch, Prompt, RunState, Sample, TokenStats, TrainBackend
from rlhpc.config.schema import AlgorithmSection
from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.observe.metrics import Stopwatch
from rlhpc.trainer.advantages import attach_advantages, kl_in_reward, step_advantages
from rlhpc.trainer.batches import Minibatch, exchange_samples, rl_minibatches, sft_minibatch
from rlhpc.trainer.build import Run
from rlhpc.trainer.rollout import generate_samples

Metrics = dict[str, float]
_WEIGHT = "weight"  # the sum of the loss weights among a loss's metrics


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
        samples, greedy = _rollout(run, state, prompts)
        run.weights.sleep()
    section = _section_in_force(run, state)
    with clock("prepare"):
        minibatches = rl_minibatches(run, samples)
    touch("log_probs", step)
    with clock("log_probs"):
        minibatches = _attach_log_probs(run, minibatches)
    with clock("prepare"):
        advantages = step_advantages(run, section, samples, greedy, minibatches)
        minibatches = attach_advantages(minibatches, samples, advantages.of_samples)
    touch("update", step)
    with clock("update"):
        metrics = _update(run, section, state, minibatches)
    _check_gap(run, metrics["engine_gap_mean"], step)
    if advantages.divergence is not None:
        metrics["kl"] = advantages.divergence
    metrics |= _adapt_coefficient(section, state, metrics, len(samples))
    state.step += 1
    return {**metrics, **_sample_metrics(samples, advantages.of_samples), **clock.metrics()}, samples


def _rollout(run: Run, state: RunState, prompts: Sequence[Prompt]) -> tuple[list[Sample], list[Sample]]:
    """Every engine's samples of the step, and the likeliest response to each prompt where the algorithm asks for it."""
    section = run.config.rollout
    samples = exchange_samples(
        run, generate_samples(run, state, prompts, section.samples_per_prompt, section.temperature)
    )
    if not run.algorithm.needs_greedy:
        return samples, []
    return samples, exchange_samples(run, generate_samples(run, state, prompts, 1, temperature=0.0))


def _section_in_force(run: Run, state: RunState) -> AlgorithmSection:
    """The algorithm's section, with the KL coefficient that steps before have come to."""
    section = run.config.algorithm
    if section.kl.target is None or not section.kl.coefficient:
        state.kl_coefficient = None
        return section
    if state.kl_coefficient is None:
        state.kl_coefficient = section.kl.coefficient
    return with_coefficient(section, state.kl_coefficient)


def _adapt_coefficient(section: AlgorithmSection, state: RunState, metrics: Metrics, samples: int) -> Metrics:
    if state.kl_coefficient is None:
        return {}
    state.kl_coefficient = adapted_coefficient(section.kl.coefficient, metrics["kl"], samples, section.kl)
    return {"kl_coefficient": section.kl.coefficient}


def _attach_log_probs(run: Run, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
    """Add the log-probs that the loss compares with: before the step's first update, and under the reference model.

    With a single update a step the former are the ones of that update itself, and need no pass of their own unless
    the reward takes them.
    """
    attached = list(minibatches)
    if run.config.train.minibatches * run.config.train.epochs > 1 or kl_in_reward(run.config.algorithm):
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


def _update(run: Run, algorithm: AlgorithmSection, state: RunState, minibatches: Sequence[Minibatch]) -> Metrics:
    """Epochs times minibatches optimizer updates; metrics are means over the step's updates."""
    section = run.config.train
    rate = learning_rate(section.optimizer, state.step, section.steps)
    loss = functools.partial(_policy_loss, run=run, section=algorithm)
    totals: Metrics = {}
    updates = [minibatch for _ in range(section.epochs) for minibatch in minibatches]
    for minibatch in updates:
        stats = run.actor.train(minibatch.batches, loss, minibatch.denominator, run.config.rollout.temperature, rate)
        means = _means(stats.sums, minibatch.denominator)
        for name, value in {**means, **stats.gauges, "gradient_norm": stats.gradient_norm}.items():
            totals[name] = totals.get(name, 0.0) + value / len(updates)
        for name, value in stats.sums.items():
            if name.startswith("max/"):
                totals[name.removeprefix("max/")] = max(totals.get(name.removeprefix("max/"), value), value)
    return {**totals, "learning_rate": rate}


def _means(sums: Mapping[str, float], denominator: float) -> Metrics:
    """Losses by what the loss is divided by, all else by its tokens' weights: the same but for a constant."""
    means = {}
    for name, value in sums.items():
        if "/" not in name and name != _WEIGHT:
            is_loss = name == "loss" or name.endswith("_loss")
            means[name] = value / (denominator if is_loss else sums[_WEIGHT])
    return means


def _check_gap(run: Run, gap: float, step: int) -> None:
    """Engine and trainer gave the same tokens the same log-probs, up to rounding; equal on every rank."""
    limit = run.config.reshard.max_engine_gap
    if limit is not None and not gap <= limit:
        raise UserError(
            f"in step {step} the engine's log-probs differ from the trainer's by {gap:.3g} on average",
            where="reshard.max_engine_gap",
            remedy=f"set reshard.verify to always to see whether it is the weights, or raise the limit of {limit:g}",
        )


def _policy_loss(stats: TokenStats, batch: PackedBatch, run: Run, section: AlgorithmSection) -> LossSums:
    """The algorithm's loss on one packed batch, and how far the engine's log-probs are from the trainer's."""
    before = batch.extra.get("old_log_probs", stats.log_probs.detach())
    tokens = {
        **batch.extra,
        "log_probs": stats.log_probs,
        "entropy": stats.entropy,
        "old_log_probs": before,
        "weight": batch.loss_weight,
        "sequence": batch.sequence,
    }
    sums = run.algorithm.loss(tokens, section)
    gap = (before - batch.extra["engine_log_probs"]).abs()
    metrics = {name: value.detach() for name, value in sums.items()}
    metrics[_WEIGHT] = batch.loss_weight.sum()
    metrics["engine_gap_mean"] = (gap * batch.loss_weight).sum()
    metrics["max/engine_gap_max"] = gap.max()
    return LossSums(sums["loss"], metrics)


def _sft_loss(stats: TokenStats, batch: PackedBatch) -> LossSums:
    loss = negative_log_likelihood(stats.log_probs, batch.loss_weight)
    return LossSums(loss, {"loss": loss.detach()})


def _sample_metrics(samples: Sequence[Sample], advantages: Sequence[np.ndarray]) -> Metrics:
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.response_len for sample in samples])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "advantage/zero_fraction": float(np.mean([not tokens.any() for tokens in advantages])),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
        "rollout/completion_tokens": float(lengths.sum()),
        "tokens": float(sum(len(sample.tokens) for sample in samples)),
    }

"""A step's optimizer updates: of the actor by the algorithm's loss, of a critic towards the returns."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rlhpc.algo import Algorithm
from rlhpc.algo.kl import kl_divergence
from rlhpc.algo.losses import negative_log_likelihood, value_loss
from rlhpc.algo.schedule import learning_rate
from rlhpc.api import LossFunction, LossSums, PackedBatch, RunState, Sample, TokenStats, TokenValues, TrainStats
from rlhpc.config.schema import AlgorithmSection
from rlhpc.trainer.advantages import StepAdvantages
from rlhpc.trainer.batches import rl_minibatches
from rlhpc.trainer.build import Run
from rlhpc.trainer.roles import PerSample
from rlhpc.trainer.skipped import Update, make_update

Metrics = dict[str, float]
_WEIGHT = "weight"  # the sum of the loss weights among a loss's metrics


def update_actor(
    run: Run,
    section: AlgorithmSection,
    state: RunState,
    samples: Sequence[Sample],
    values: Mapping[str, PerSample],
    estimate: StepAdvantages,
) -> Metrics:
    """Nothing while only the critic learns."""
    if run.critic is not None and state.step < run.config.critic.warmup_steps:
        return {}
    names = ("engine_log_probs", "old_log_probs", "reference_log_probs")
    tokens = {name: values[name] for name in names if name in values}
    loss = functools.partial(policy_loss, algorithm=run.algorithm, section=section)
    tokens["advantages"] = estimate.advantages
    fresh = [sample.policy_version == state.policy_version for sample in samples]
    if not all(fresh):  # engine and trainer are compared where both had the same weights
        tokens["fresh"] = [
            np.full(sample.response_len, flag, np.float32) for sample, flag in zip(samples, fresh, strict=True)
        ]
    return _update(run, "actor", state, samples, tokens, loss)


def update_critic(
    run: Run, state: RunState, samples: Sequence[Sample], values: Mapping[str, PerSample], estimate: StepAdvantages
) -> Metrics:
    """Metrics are named critic/…"""
    assert estimate.returns is not None, f"{run.algorithm.name} has a critic and no returns for it"
    tokens = {"old_values": values["old_values"], "returns": estimate.returns}
    loss = functools.partial(critic_loss, clip=run.config.critic.value_clip)
    metrics = _update(run, "critic", state, samples, tokens, loss)
    run.critic.offload()
    return {f"critic/{name}": value for name, value in metrics.items()}


def _update(
    run: Run,
    model: Literal["actor", "critic"],
    state: RunState,
    samples: Sequence[Sample],
    tokens: Mapping[str, PerSample],
    loss: LossFunction,
) -> Metrics:
    """Epochs times minibatches optimizer updates."""
    section, temperature = run.config.train, run.config.rollout.temperature
    optimizer = run.config.critic.optimizer if model == "critic" else run.config.actor.optimizer
    role = run.models.critic if model == "critic" else run.models.actor
    rate = learning_rate(optimizer, state.step, section.steps)
    prompt_ids = [sample.prompt_id for sample in samples]
    minibatches = rl_minibatches(run, role, samples, tokens)
    made: list[tuple[TrainStats, float]] = []
    for number, minibatch in enumerate(minibatches * section.epochs, 1):
        update = Update("rl", state.step + 1, model, number, minibatch, temperature, rate, prompt_ids)
        made.append((make_update(run, role, state, update, loss), minibatch.denominator))
    return {**_step_metrics(made), "learning_rate": rate}


def _step_metrics(made: Sequence[tuple[TrainStats, float]]) -> Metrics:
    """Means over the updates that were applied, each with its denominator; none of them where all were skipped."""
    applied = [(stats, denominator) for stats, denominator in made if stats.applied]
    totals: Metrics = {}
    for stats, denominator in applied:
        means = _means(stats.sums, denominator)
        for name, value in {**means, **stats.gauges, "grad_norm": stats.grad_norm}.items():
            totals[name] = totals.get(name, 0.0) + value / len(applied)
        for name, value in stats.sums.items():
            if name.startswith("max/"):
                totals[name.removeprefix("max/")] = max(totals.get(name.removeprefix("max/"), value), value)
    return {**totals, "skipped_updates": float(len(made) - len(applied))}


def _means(sums: Mapping[str, float], denominator: float) -> Metrics:
    """Losses by what the loss is divided by, all else by its tokens' weights: the same but for a constant."""
    means = {}
    for name, value in sums.items():
        if "/" not in name and name != _WEIGHT:
            is_loss = name == "loss" or name.endswith("_loss")
            means[name] = value / (denominator if is_loss else sums.get(f"{name}/{_WEIGHT}", sums[_WEIGHT]) or 1.0)
    return means


def sft_loss(stats: TokenStats, batch: PackedBatch) -> LossSums:
    """The supervised warm-up's: minus the log-likelihood of the responses."""
    loss = negative_log_likelihood(stats.log_probs, batch.loss_weight)
    return LossSums(loss, {"loss": loss.detach()})


def policy_loss(stats: TokenStats, batch: PackedBatch, algorithm: Algorithm, section: AlgorithmSection) -> LossSums:
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
    sums = algorithm.loss(tokens, section)
    fresh = batch.extra.get("fresh", batch.mask) * batch.mask
    engine = batch.extra["engine_log_probs"]
    difference = (before - engine).abs() * fresh
    mismatch = kl_divergence(engine, before, "k3") * fresh  # the engine sampled, so the mean is over its distribution
    metrics = {name: value.detach() for name, value in sums.items()}
    metrics[_WEIGHT] = batch.loss_weight.sum()
    compared = (fresh * batch.loss_weight).sum()
    for name, values in (("logprob_diff_mean", difference), ("mismatch_kl", mismatch)):
        metrics[name], metrics[f"{name}/{_WEIGHT}"] = (values * batch.loss_weight).sum(), compared
    metrics["max/logprob_diff_max"] = difference.max()
    return LossSums(sums["loss"], metrics)


def critic_loss(stats: TokenValues, batch: PackedBatch, clip: float | None) -> LossSums:
    """Half the squared error of the values."""
    returns, weight = batch.extra["returns"], batch.loss_weight
    sums = value_loss(stats.values, returns, batch.extra["old_values"], weight, clip)
    metrics = {
        "loss": sums.loss.detach(),
        "clip_fraction": sums.clipped,
        "value_mean": (stats.values.detach() * weight).sum(),
        "return_mean": (returns * weight).sum(),
        _WEIGHT: weight.sum(),
    }
    return LossSums(sums.loss, metrics)

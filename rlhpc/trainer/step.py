"""One step, read from top to bottom as a single program. Every rank runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhpc.algo.kl import adapted_coefficient, with_coefficient
from rlhpc.algo.schedule import learning_rate
from rlhpc.api import RunState, Sample
from rlhpc.config.schema import AlgorithmSection
from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.observe.metrics import Stopwatch
from rlhpc.trainer.advantages import step_advantages, token_values
from rlhpc.trainer.batches import sft_minibatch
from rlhpc.trainer.build import Run
from rlhpc.trainer.routed_experts import trained_routed_experts
from rlhpc.trainer.sampling import draw_samples, scored_by_model, step_samples
from rlhpc.trainer.skipped import Update, make_update
from rlhpc.trainer.update import Metrics, sft_loss, update_actor, update_critic


def sft_step(run: Run, state: RunState) -> Metrics:
    """One supervised update."""
    section = run.config.sft
    touch("supervised step", state.sft_step + 1)
    rows, state.sft_cursor = run.sft.take(state.sft_cursor, section.sequences_per_step, run.config.seed)
    minibatch = sft_minibatch(run, [run.sft.sequences[row] for row in rows])
    rate = learning_rate(section.optimizer, state.sft_step, section.steps)
    update = Update("sft", state.sft_step + 1, "actor", 1, minibatch, 1.0, rate, rows)
    stats = make_update(run, run.models.actor, state, update, sft_loss)
    state.sft_step += 1
    metrics = {"learning_rate": rate, "tokens": minibatch.denominator, "skipped_updates": float(not stats.applied)}
    if stats.applied:
        loss = stats.sums["loss"] / minibatch.denominator
        metrics |= {**stats.gauges, "loss": loss, "grad_norm": stats.grad_norm}
    return metrics


def rl_step(run: Run, state: RunState) -> tuple[Metrics, list[Sample]]:
    """One step of RL: generate with the present weights, score, and learn from it."""
    clock = Stopwatch()
    step = state.step + 1
    touch("weight sync", step)
    with clock("weight_sync"):
        run.weights.sync()
        state.policy_version = run.weights.policy_version
    touch("rollout", step)
    with clock("rollout"):
        drawn = draw_samples(run, state)
        run.weights.sleep()
    if run.models.reward is not None and drawn.samples:
        touch("reward model", step)
        with clock("reward_model"):
            drawn = scored_by_model(run, drawn)
    rollout = step_samples(run, drawn)
    samples, greedy, sampled = rollout.samples, rollout.greedy, rollout.metrics
    if not samples:  # nothing to learn from, which dynamic sampling says of prompts that are all too easy or too hard
        state.step += 1
        return {**sampled, **clock.metrics()}, []
    with clock("rollout"):
        samples = trained_routed_experts(run, samples)
    del drawn, rollout  # with routed experts that are trained on elsewhere
    section = _section_in_force(run, state)
    touch("log_probs", step)
    with clock("log_probs"):
        values = token_values(run, samples)
    with clock("prepare"):
        estimate = step_advantages(run, section, samples, greedy, values)
    touch("update", step)
    with clock("update"):
        metrics = update_critic(run, state, samples, values, estimate) if run.critic else {}
        metrics |= update_actor(run, section, state, samples, values, estimate)
    _check_logprob_diff(run, metrics.get("logprob_diff_mean", 0.0), step)
    if estimate.divergence is not None and math.isfinite(estimate.divergence):
        metrics["kl"] = estimate.divergence
    metrics |= _adapt_coefficient(section, state, metrics, len(samples))
    state.step += 1
    sampled = {**_sample_metrics(samples, estimate.advantages), **sampled}
    return {**metrics, **sampled, **clock.metrics()}, samples


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
    if state.kl_coefficient is None or not math.isfinite(metrics.get("kl", math.nan)):  # the actor has not learnt
        return {}
    state.kl_coefficient = adapted_coefficient(section.kl.coefficient, metrics["kl"], samples, section.kl)
    return {"kl_coefficient": section.kl.coefficient}


def _check_logprob_diff(run: Run, difference: float, step: int) -> None:
    """Engine and trainer gave the same tokens the same log-probs, up to rounding; equal on every rank.

    With top_p the engine's are of the distribution that was drawn from, which is another one.
    """
    limit = run.config.reshard.max_logprob_diff if run.config.rollout.top_p == 1 else None
    if limit is not None and not difference <= limit:
        raise UserError(
            f"in step {step} the engine's log-probs differ from the trainer's by {difference:.3g} on average",
            where="reshard.max_logprob_diff",
            remedy=f"set reshard.verify to always to see whether it is the weights, or raise the limit of {limit:g}",
        )


def _sample_metrics(samples: Sequence[Sample], advantages: Sequence[np.ndarray]) -> Metrics:
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.response_len for sample in samples])
    parts = {name for sample in samples for name in sample.reward_parts}
    return {
        **{f"reward/{name}": _part_mean(samples, name) for name in sorted(parts)},
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


def _part_mean(samples: Sequence[Sample], name: str) -> float:
    """Over the samples that have it."""
    return float(np.mean([sample.reward_parts[name] for sample in samples if name in sample.reward_parts]))

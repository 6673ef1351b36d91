"""One step, read from top to bottom as a single program. Every rank runs it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from rlhpc.algo.objective import adapted_coefficient, with_coefficient
from rlhpc.api import RunState, Sample
from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.core.imports import import_attribute
from rlhpc.observe.metrics import Stopwatch
from rlhpc.parallel.compat import device
from rlhpc.trainer.advantages import StepAdvantages, step_advantages, token_values
from rlhpc.trainer.choosing import StepSamples
from rlhpc.trainer.routed_experts import trained_routed_experts
from rlhpc.trainer.run import Run
from rlhpc.trainer.step_data import StepData
from rlhpc.trainer.update import Metrics

_log = logging.getLogger(__name__)
_OTHER_DISTRIBUTION = (
    "in step %d the engine's log-probs were %.3g nats a token above the trained ones: tokens are drawn from another "
    "distribution than the one trained (docs/sampling.md); mismatch_k1 is the figure of each step"
)

# Limits of logprob_diff_mean, in nats.
_LATER_DIFF, _FIRST_DIFF, _FIRST_DIFF_EXACT = 0.5, 0.05, 1e-3

Step = Callable[[Run, RunState], tuple[Metrics, list[Sample]]]


def find_step(config: RunConfig) -> Step:
    """The RL step: ``rl_step``, or the user's own that ``train.step`` names."""
    if config.train.step is None:
        return rl_step
    path = config.train.step
    own = import_attribute(path, where="train.step")
    if not callable(own):
        kind, remedy = type(own).__name__, "name a function that is called as step(run, state)"
        raise UserError(f"{path} is of type {kind}", where="train.step", remedy=remedy)

    def step(run: Run, state: RunState) -> tuple[Metrics, list[Sample]]:
        match own(run, state):
            case dict() as metrics, list() as samples:
                return metrics, samples
            case other:
                raise UserError(
                    f"{path} returned a value of type {type(other).__name__}",
                    where="train.step",
                    remedy="return (metrics, samples): a dict of numbers by name, and the list of samples trained on",
                )

    return step


def take_step(step: Step, run: Run, state: RunState) -> Metrics:
    """Makes one step of RL, which makes a policy version if it changes the actor's weights."""
    before, run.step_data = run.updater.actor_updates, None
    metrics, samples = step(run, state)
    own = run.config.train.step is not None and bool(samples)  # it may train without the updater
    if run.judges is not None:
        metrics = {**metrics, **run.judges.end_step(state)}
    state.policy_version += own or run.updater.actor_updates > before
    state.step += 1
    return {**metrics}


def sft_step(run: Run, state: RunState) -> Metrics:
    """One supervised update."""
    section, sequences = run.config.sft, run.sft
    assert section is not None
    assert sequences is not None
    touch("supervised step", state.sft_step + 1)
    clock = Stopwatch()
    with clock("update"):
        metrics = run.updater.supervised(section, state, sequences)
    return {**metrics, **clock.metrics()}


def rl_step(run: Run, state: RunState) -> tuple[Metrics, list[Sample]]:
    """One step of RL: generate with the present weights, score, and train."""
    clock = Stopwatch()
    batch = generate(run, state, clock)
    samples, step = batch.samples, state.step + 1
    if not samples:  # with dynamic sampling: all prompts are too easy or too hard
        return {**batch.metrics, **clock.metrics()}, []
    section = current_section(run.config.algorithm, state)
    touch("log_probs", step)
    with clock("log_probs"):
        values = token_values(run.models, run.batching, samples, run.config.rollout.temperature)
    with clock("prepare"):
        estimate = step_advantages(run.algorithm, section, samples, batch.greedy, values)
    generated = [sample for sample in samples if sample.policy_version == state.policy_version] + batch.greedy
    run.step_data = StepData(samples, values, estimate, generated, batch.reward_lengths)
    touch("update", step)
    with clock("update"):
        metrics = run.updater.update_critic(state, samples, values, estimate) if run.models.has_critic else {}
        metrics |= run.updater.update_actor(section, state, samples, values, estimate)
    limit = logprob_limit(run.config, first=run.updater.first_actor_step, on_gpu=device().type == "cuda")
    check_logprob_diff(limit, metrics.get("logprob_diff_mean", 0.0), step)
    if not run.config.rollout.trains_what_it_samples and run.updater.first_actor_step and run.context.info.rank == 0:
        _log.warning(_OTHER_DISTRIBUTION, step, metrics.get("mismatch_k1", math.nan))
    if estimate.divergence is not None and math.isfinite(estimate.divergence):
        metrics["kl"] = estimate.divergence
    metrics |= adapt_coefficient(section, state, metrics, len(samples))
    zero = zero_fraction(samples, estimate)
    sampled = {**sample_metrics(samples), "advantage/zero_fraction": zero, **batch.metrics}
    return {**metrics, **sampled, **clock.metrics()}, samples


def generate(run: Run, state: RunState, clock: Stopwatch) -> StepSamples:
    """The first half of a step: weight sync, rollout, rewards. Leaves an engine of this rank asleep."""
    assert run.rl is not None
    chooser, sampled = run.rl.chooser, run.rl.generate(state, clock)
    if chooser.reward_model is not None and sampled.samples:
        touch("reward model", state.step + 1)
        with clock("reward_model"):
            sampled = chooser.scored_by_model(sampled)
    batch = chooser.choose(state, sampled)
    with clock("rollout"):
        if batch.samples:
            batch.samples = trained_routed_experts(run.models.actor, run.batching, batch.samples, state.step)
    return batch


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """Rewards and lengths of a step's samples."""
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.sampled_len for sample in samples])
    parts = {name for sample in samples for name in sample.reward_parts}
    return {
        **{f"reward/{name}": _part_mean(samples, name) for name in sorted(parts)},
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
        "rollout/completion_tokens": float(lengths.sum()),
        "tokens": float(sum(len(sample.tokens) for sample in samples)),
    }


def zero_fraction(samples: Sequence[Sample], estimate: StepAdvantages) -> float:
    """Share of the samples trained on whose tokens all have advantage 0."""
    advantages = zip(samples, estimate.advantages, strict=True)
    zeros = [not tokens.any() for sample, tokens in advantages if sample.trained_len]
    return float(np.mean(zeros)) if zeros else 0.0


def _part_mean(samples: Sequence[Sample], name: str) -> float:
    """Over the samples that have it."""
    return float(np.mean([sample.reward_parts[name] for sample in samples if name in sample.reward_parts]))


def current_section(section: AlgorithmSection, state: RunState) -> AlgorithmSection:
    """The algorithm's section, with the KL coefficient as adapted by former steps."""
    if section.kl.target is None or not section.kl.coefficient:
        state.kl_coefficient = None
        return section
    if state.kl_coefficient is None:
        state.kl_coefficient = section.kl.coefficient
    return with_coefficient(section, state.kl_coefficient)


def adapt_coefficient(section: AlgorithmSection, state: RunState, metrics: Metrics, samples: int) -> Metrics:
    """Adapts the KL coefficient after a step with an update of the actor: without one the divergence does not change,
    and the coefficient would go on rising or falling."""
    updated = "grad_norm" in metrics
    if state.kl_coefficient is None or not updated or not math.isfinite(metrics.get("kl", math.nan)):
        return {}
    state.kl_coefficient = adapted_coefficient(section.kl.coefficient, metrics["kl"], samples, section.kl)
    return {"kl_coefficient": section.kl.coefficient}


def logprob_limit(config: RunConfig, *, first: bool, on_gpu: bool) -> float | None:
    """Limit of the mean difference of log-probs between engine and trainer, in nats; None without one. ``first``: of an
    attempt's first update, where neither side's weights have moved.

    Where the engine samples from another distribution than the one trained, they differ: the metric mismatch_k1 is by
    how much.
    """
    limit = config.reshard.max_logprob_diff if config.rollout.trains_what_it_samples else None
    if limit != "auto":
        return limit
    exact = config.model.dtype == "float32" and not on_gpu
    return _LATER_DIFF if not first else _FIRST_DIFF_EXACT if exact else _FIRST_DIFF


def check_logprob_diff(limit: float | None, difference: float, step: int) -> None:
    """Checks that engine and trainer gave the same tokens the same log-probs, up to rounding; equal on every rank."""
    if limit is not None and not difference <= limit:
        raise UserError(
            f"in step {step} the engine's log-probs differ from the trainer's by {difference:.3g} on average",
            where="reshard.max_logprob_diff",
            remedy="reshard.verify: always shows whether it is the weights, `rlhpc run --check --engine` whether vLLM "
            f"computes the model otherwise; or raise the limit of {limit:g}",
        )

"""A step's optimizer updates: of the actor by the algorithm's loss, of a critic towards the returns."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from rlhpc.algo import Algorithm
from rlhpc.algo.losses import negative_log_likelihood, value_loss
from rlhpc.algo.objective import kl_divergence
from rlhpc.algo.schedule import learning_rate
from rlhpc.api import LossFunction, LossSums, PackedBatch, RunState, Sample, TokenStats, TokenValues, TrainStats
from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.config.schema import RunConfig, SFTSection
from rlhpc.core import spans
from rlhpc.core.context import RankContext
from rlhpc.core.histograms import Histogram, diff_histogram, inner_diff_edges
from rlhpc.data.sft import SFTSet
from rlhpc.trainer.advantages import StepAdvantages
from rlhpc.trainer.batches import Batching, rl_minibatches, sft_minibatch
from rlhpc.trainer.roles import JudgeModels, Models, PerSample
from rlhpc.trainer.skipped import Update, make_update
from rlhpc.trainer.staleness import AGE, age_metrics, age_sums, ages_of, token_ages

Metrics = dict[str, float]
_WEIGHT = "weight"  # metric of a loss: the sum of its loss weights
_COMPARED, _ABOVE = "diff/tokens", "diff/above/"  # sums of a loss: tokens compared, and those above each inner edge


@dataclass
class Updater:
    """Makes a run's optimizer updates. All methods are collective."""

    config: RunConfig
    context: RankContext
    models: Models | JudgeModels
    batching: Batching
    algorithm: Algorithm
    actor_updates: int = 0  # that RL steps of this attempt have made and not skipped
    first_actor_step: bool = False  # the actor's last step was the first of this attempt that updated it
    logprob_diffs: Histogram | None = None  # of the actor's last step, between engine and trainer
    supervised_lengths: Sequence[int] = ()  # tokens of each sequence of the last supervised update
    _sums: Sequence[Mapping[str, float]] = ()  # of the losses of the actor's last updates
    _begun: dict[str, tuple[int, int]] = field(default_factory=dict)  # of a model: step, and its own steps before it

    def update_actor(
        self,
        section: AlgorithmSection,
        state: RunState,
        samples: Sequence[Sample],
        values: Mapping[str, PerSample],
        estimate: StepAdvantages,
    ) -> Metrics:
        """The step's updates by the algorithm's loss; none during the critic's warm-up."""
        self.logprob_diffs = None
        if state.step < self._frozen_steps("actor"):
            return {}
        names = ("engine_log_probs", "old_log_probs", "reference_log_probs")
        tokens = {name: values[name] for name in names if name in values}
        tokens["advantages"] = estimate.advantages
        ages = token_ages(samples, state.policy_version)
        fresh = self._fresh(samples, ages)
        if not all(each.all() for each in fresh):  # engine and trainer are compared where both had the same weights
            tokens["fresh"] = fresh
        distances: tuple[int, ...] = ()
        if self.config.placement != "colocated":
            tokens[AGE], distances = ages, ages_of(ages)
        loss = functools.partial(policy_loss, algorithm=self.algorithm, section=section, ages=distances)
        metrics = self.update("actor", state, samples, tokens, loss)
        return {**metrics, **age_metrics(self._sums, distances)}

    def _fresh(self, samples: Sequence[Sample], ages: PerSample) -> PerSample:
        """1 for each token that the present weights sampled, with a KV cache of theirs; else 0."""
        config = self.config
        keeps = config.placement == "colocated" or config.asynchrony.in_flight == "keep"
        if keeps or config.actor.moe.router_replay:
            # Later tokens of a response may attend to an older cache, or to one of other experts than those replayed.
            ages = [np.full_like(each, each.max(initial=0)) for each in ages]
        return [(each == 0).astype(np.float32) for each in ages]

    def update_critic(
        self, state: RunState, samples: Sequence[Sample], values: Mapping[str, PerSample], estimate: StepAdvantages
    ) -> Metrics:
        """The step's updates of the critic; metrics are named critic/… Judges begin them, and have none yet."""
        assert estimate.returns is not None, f"{self.algorithm.name} has a critic and no returns for it"
        if self.models.judges is not None and self.models.critic is None:
            self.models.judges.train_critic(state, samples, values["old_values"], estimate.returns)
            return {}
        tokens = {"old_values": values["old_values"], "returns": estimate.returns}
        loss = functools.partial(critic_loss, clip=self.config.critic.value_clip)
        metrics = self.update("critic", state, samples, tokens, loss)
        self.models.trained["critic"].model.offload()
        return {f"critic/{name}": value for name, value in metrics.items()}

    def update(
        self,
        model: Literal["actor", "critic"],
        state: RunState,
        samples: Sequence[Sample],
        tokens: Mapping[str, PerSample],
        loss: LossFunction,
    ) -> Metrics:
        """train.epochs × train.minibatches updates of a model on a step's samples. ``loss`` finds each of ``tokens`` in
        the batch's ``extra``; its sums are divided by weights that count the tokens of each minibatch over all ranks.
        """
        temperature = self.config.rollout.temperature
        role, rate = self.models.trained[model], self._begin_step(model, state)
        prompt_ids = [sample.prompt_id for sample in samples]
        made: list[tuple[TrainStats, float]] = []
        for number, minibatch in enumerate(rl_minibatches(role, self.batching, samples, tokens, state.step), 1):
            update = Update("rl", state.step + 1, model, number, minibatch, temperature, rate, prompt_ids)
            made.append((self._make(state, update, loss), minibatch.denominator))
        if model == "actor":
            self.first_actor_step = self.actor_updates == 0
            self.actor_updates += sum(stats.applied for stats, _ in made)
            self._sums = [stats.sums for stats, _ in made]
            self.logprob_diffs = logprob_diffs_of(self._sums)
        return {**step_metrics(made), "learning_rate": rate}

    def supervised(self, section: SFTSection, state: RunState, sequences: SFTSet) -> Metrics:
        """One update of the actor in the warm-up, on the next examples."""
        with spans.part("data"):
            rows, state.sft_cursor = sequences.take(state.sft_cursor, section.sequences_per_step, self.config.seed)
            examples = [sequences.sequences[row] for row in rows]
            minibatch = sft_minibatch(self.models.trained["actor"], examples)
            self.supervised_lengths = [len(example.tokens) for example in examples]
        rate = learning_rate(section.optimizer, state.sft_step, section.steps)
        update = Update("sft", state.sft_step + 1, "actor", 1, minibatch, 1.0, rate, rows)
        stats = self._make(state, update, sft_loss)
        metrics = {"learning_rate": rate, "tokens": minibatch.denominator, "skipped_updates": float(not stats.applied)}
        if stats.applied:
            loss = stats.sums["loss"] / minibatch.denominator
            metrics |= {**stats.gauges, "loss": loss, "grad_norm": stats.grad_norm}
        return metrics

    def _begin_step(self, model: Literal["actor", "critic"], state: RunState) -> float:
        """Counts the step as one that trains the model, once for all its updates, and returns their learning rate."""
        frozen, last = self._frozen_steps(model), self._begun.get(model)
        if last is None or last[0] != state.step:
            counted = getattr(state, f"{model}_steps")
            own = max(0, state.step - frozen) if counted is None else counted
            self._begun[model] = last = (state.step, own)
        _, own = last
        setattr(state, f"{model}_steps", own + 1)
        optimizer = self.config.critic.optimizer if model == "critic" else self.config.actor.optimizer
        return learning_rate(optimizer, own, self.config.train.steps - frozen)

    def _frozen_steps(self, model: Literal["actor", "critic"]) -> int:
        """The number of first steps that do not train the model."""
        return self.config.critic.warmup_steps if model == "actor" and self.models.has_critic else 0

    def _make(self, state: RunState, update: Update, loss: LossFunction) -> TrainStats:
        return make_update(self.context, self.config.train, self.models.trained[update.model], state, update, loss)


def step_metrics(made: Sequence[tuple[TrainStats, float]]) -> Metrics:
    """Means over the applied updates, each given with its denominator; empty if all were skipped. An update without a
    token that a metric is of, such as a fresh one, has no part in the metric's mean."""
    applied = [(stats, denominator) for stats, denominator in made if stats.applied]
    found: dict[str, list[float]] = {}
    for stats, denominator in applied:
        means = means_of(stats.sums, denominator)
        for name, value in {**means, **stats.gauges, "grad_norm": stats.grad_norm}.items():
            found.setdefault(name, []).append(value)
    totals = {name: sum(values) / len(values) for name, values in found.items()}
    for stats, _ in applied:
        for name, value in stats.sums.items():
            if name.startswith("max/"):
                totals[name.removeprefix("max/")] = max(totals.get(name.removeprefix("max/"), value), value)
    return {**totals, "skipped_updates": float(len(made) - len(applied))}


def logprob_diffs_of(updates: Sequence[Mapping[str, float]]) -> Histogram | None:
    """Histogram from the loss sums of a step's updates, skipped ones too."""
    edges = range(len(inner_diff_edges()))
    above = [sum(sums.get(f"{_ABOVE}{place}", 0.0) for sums in updates) for place in edges]
    return diff_histogram(above, sum(sums.get(_COMPARED, 0.0) for sums in updates))


def means_of(sums: Mapping[str, float], denominator: float) -> Metrics:
    """Losses divided by the loss's denominator, all other sums by their tokens' weights; none of those without any."""
    means = {}
    for name, value in sums.items():
        if "/" not in name and name != _WEIGHT:
            is_loss = name == "loss" or name.endswith("_loss")
            weight = denominator if is_loss else sums.get(f"{name}/{_WEIGHT}", sums[_WEIGHT])
            if weight:
                means[name] = value / weight
    return means


def sft_loss(stats: TokenStats, batch: PackedBatch) -> LossSums:
    """Negative log-likelihood of the responses: the loss of the supervised warm-up."""
    loss = negative_log_likelihood(stats.log_probs, batch.loss_weight)
    return LossSums(loss, {"loss": loss.detach()})


def policy_loss(
    stats: TokenStats,
    batch: PackedBatch,
    algorithm: Algorithm,
    section: AlgorithmSection,
    ages: Sequence[int] = (),
) -> LossSums:
    """The algorithm's loss on one packed batch, and the difference of log-probs between engine and trainer, also by the
    ``ages`` of tokens."""
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
    apart = (before - engine).abs()
    difference = apart * fresh
    # The engine sampled, so means of estimators are over its distribution. k3 is biased where tokens are cut off.
    divergence = kl_divergence(engine, before, "k3")
    mismatch, truncation = divergence * fresh, (engine - before) * fresh
    metrics = {name: value.detach() for name, value in sums.items()}
    metrics[_WEIGHT] = batch.loss_weight.sum()
    compared = (fresh * batch.loss_weight).sum()
    for name, values in (("logprob_diff_mean", difference), ("mismatch_kl", mismatch), ("mismatch_k1", truncation)):
        metrics[name], metrics[f"{name}/{_WEIGHT}"] = (values * batch.loss_weight).sum(), compared
    metrics["max/logprob_diff_max"] = difference.max()
    if ages:
        compared_with = {"mismatch_kl": divergence, "logprob_diff_mean": apart}
        metrics |= age_sums(ages, batch.extra[AGE], batch.mask, compared_with)
    edges = torch.tensor(inner_diff_edges(), device=difference.device)
    above = (difference.detach()[:, None] > edges).sum(0)
    metrics |= {_COMPARED: fresh.sum(), **{f"{_ABOVE}{place}": count for place, count in enumerate(above)}}
    return LossSums(sums["loss"], metrics)


def critic_loss(stats: TokenValues, batch: PackedBatch, clip: float | None) -> LossSums:
    """Half the squared error of the values, clipped around the old ones."""
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

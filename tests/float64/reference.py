"""The run of a seed computed again: responses from the script, then every step by plain loops over tokens in float64.

From the run itself it takes what the engine reports (log-probs and policy versions), which groups a step trains on, and
how samples are divided into minibatches; ``compare.py`` checks that these divisions are complete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhpc.config.schema import RunConfig
from tests.float64.adam import Adam, is_spike, learning_rate, norm_of
from tests.float64.advantages import ADVANTAGES, Estimate, others_of
from tests.float64.answers import Answer, answer_of
from tests.float64.drive import RunRecord, StepRecord, Tables
from tests.float64.losses import LOSSES, Token, corrections, kl_term, token_weights, value_term
from tests.float64.script import FIRST, GREEDY, MOST_TOKENS, POSITIONS, VOCABULARY, config_of, table_of

Sums = dict[str, float]


def float32(value: float) -> float:
    """A number as it is kept between two parts of a step."""
    return float(np.float32(value))


@dataclass
class Expected:
    """A step by the reference: metrics; gradients of each model's updates; the models' weights after the step."""

    metrics: dict[str, float]
    gradients: dict[str, list[Tables]]
    weights: dict[str, Tables]
    answers: list[Answer]


class Reference:
    """The run of a seed. All arithmetic is float64; ``stored`` says how log-probs and values of a forward pass,
    advantages and weights of tokens are kept between two parts of a step: ``float32`` as in rlhpc
    (``rlhpc.api``), or ``float`` for float64 there too."""

    def __init__(self, record: RunRecord, stored: Callable[[float], float] = float32) -> None:
        self.seed, self._emitted, self._stored = record.seed, record.emitted, stored
        self.config = RunConfig.model_validate(config_of(record.seed))
        section = self.config.algorithm
        self._has_critic = section.name == "ppo"
        self._has_reference = section.kl.coefficient > 0
        self.tables = {"actor": table_of(self.seed, "actor", VOCABULARY)}
        if self._has_reference:
            self.tables["reference"] = table_of(self.seed, "reference", VOCABULARY)
        self._adam = {"actor": Adam(self.config.actor.optimizer)}
        if self._has_critic:
            self.tables["critic"] = table_of(self.seed, "critic", 1)
            self._adam["critic"] = Adam(self.config.critic.optimizer)
        self._coefficient = section.kl.coefficient  # the present one
        self.counts: Counter[str] = Counter()  # of what the run has
        self._steps = 0
        self._norms: dict[str, list[float]] = {name: [] for name in self._adam}
        self._trained_steps = dict.fromkeys(self._adam, 0)  # of each model

    def step(self, record: StepRecord, minibatches: dict[str, list[list[int]]]) -> Expected:
        """The next step; ``minibatches`` has the places of each update's samples by model."""
        answers = self._answers(record)
        expected = Expected({}, {"actor": [], "critic": []}, {}, answers)
        self.counts.update(_counts(answers))
        if answers:
            self._passes(answers)
            estimate = self._kept(ADVANTAGES[self.config.algorithm.name](answers, self.config.algorithm))
            expected.metrics = {**_sample_metrics(answers), "advantage/zero_fraction": _zeros(estimate)}
            if self._has_critic:
                self._update_critic(expected, estimate, minibatches["critic"])
            if not (self._has_critic and self._steps < self.config.critic.warmup_steps):
                self._update_actor(expected, estimate, minibatches["actor"])
            self._steer(expected, answers)
        expected.weights = {name: _copied(self.tables[name]) for name in self._adam}
        self._steps += 1
        return expected

    def _answers(self, record: StepRecord) -> list[Answer]:
        """The step's responses, in the run's order."""
        groups: dict[int, int] = {}
        answers = []
        for prompt_id, first in record.trained:
            place = first - FIRST
            answer = answer_of(self.seed, prompt_id, place)
            answer.group = groups.setdefault(prompt_id, len(groups))
            for t, is_sampled in enumerate(answer.sampled):
                log_prob, version = self._emitted[prompt_id, place, t] if is_sampled else (0.0, -1)
                answer.engine.append(log_prob)
                answer.versions += [version] if is_sampled else []
            answer.fresh = answer.versions[0] == record.version
            if not (self.config.train.mask_truncated and answer.truncated):
                answer.trained = [t for t, is_sampled in enumerate(answer.sampled) if is_sampled]
            if self.config.algorithm.name == "remax":
                answer.baseline = answer_of(self.seed, prompt_id, GREEDY).reward
            answers.append(answer)
        return answers

    @property
    def _keeps_old(self) -> bool:
        """Whether log-probs are computed before the step's first update: for several updates, or the reward's KL."""
        train = self.config.train
        return train.minibatches * train.epochs > 1 or self._kl_in_reward

    @property
    def _kl_in_reward(self) -> bool:
        return self._has_reference and self.config.algorithm.kl.placement == "reward"

    def _passes(self, answers: list[Answer]) -> None:
        """Log-probs and values before the step's first update."""
        kl = self.config.algorithm.kl
        for answer in answers:
            for t in answer.trained:
                if self._keeps_old:
                    answer.old[t] = self._stored(self._log_prob("actor", answer, t))
                if self._has_reference:
                    answer.reference[t] = self._stored(self._log_prob("reference", answer, t))
                if self._kl_in_reward:
                    estimate, _ = kl_term(answer.old[t], answer.reference[t], kl.estimator)
                    answer.penalty[t] = self._coefficient * estimate
                if self._has_critic:
                    answer.values[t] = self._stored(self._value(answer, t))

    def _row(self, model: str, answer: Answer, t: int) -> np.ndarray:
        """Logits (or the value) by which token t of the response is predicted: of the token before it."""
        before = ([*answer.prompt, *answer.tokens])[len(answer.prompt) + t - 1]
        position = len(answer.prompt) + t - 1
        return self.tables[model]["context"][before] + self.tables[model]["position"][position % POSITIONS]

    def _log_distribution(self, model: str, answer: Answer, t: int) -> np.ndarray:
        row = self._row(model, answer, t) / self.config.rollout.temperature
        return row - row.max() - math.log(float(np.exp(row - row.max()).sum()))

    def _log_prob(self, model: str, answer: Answer, t: int) -> float:
        return float(self._log_distribution(model, answer, t)[answer.tokens[t]])

    def _value(self, answer: Answer, t: int) -> float:
        return float(self._row("critic", answer, t)[0])

    def _kept(self, estimate: Estimate) -> Estimate:
        advantages, returns = (
            [{t: self._stored(value) for t, value in response.items()} for response in values or ()]
            for values in (estimate.advantages, estimate.returns)
        )
        return Estimate(advantages, returns)

    def _weights(self, answers: list[Answer], ids: list[int]) -> tuple[dict[int, float], float]:
        section = self.config.algorithm
        constant = section.aggregation_length or MOST_TOKENS
        weights, denominator = token_weights([len(answers[i].trained) for i in ids], section.aggregation, constant)
        return {i: self._stored(weight) for i, weight in zip(ids, weights, strict=True)}, denominator

    def _update_actor(self, expected: Expected, estimate: Estimate, minibatches: list[list[int]]) -> None:
        """The step's updates by the algorithm's loss."""
        means: list[Sums] = []
        divergences: list[float] = []
        frozen = self.config.critic.warmup_steps if self._has_critic else 0
        rate = learning_rate(
            self.config.actor.optimizer, self._trained_steps["actor"], self.config.train.steps - frozen
        )
        for ids in minibatches:
            gradient = {name: np.zeros_like(table) for name, table in self.tables["actor"].items()}
            weights, denominator = self._weights(expected.answers, ids)
            sums: Sums = {}
            largest = 0.0
            for i in ids:
                answer, advantages = expected.answers[i], estimate.advantages[i]
                most = self._policy_terms(answer, advantages, weights[i] / denominator, sums, gradient)
                largest = max(largest, most)
                for name in ("loss", "policy_loss"):
                    sums.setdefault(name, 0.0)
            expected.gradients["actor"].append(gradient)
            if self._applied("actor", gradient, rate):
                means.append({**_means(sums), "grad_norm": norm_of(gradient)})
                divergences.append(largest)
        expected.metrics |= {**_mean_of(means), **({"logprob_diff_max": max(divergences)} if divergences else {})}
        expected.metrics |= {"learning_rate": rate, "skipped_updates": float(len(minibatches) - len(means))}
        self._trained_steps["actor"] += 1

    def _policy_terms(
        self, answer: Answer, advantages: dict[int, float], share: float, sums: Sums, gradient: Tables
    ) -> float:
        """Adds a response's share of an update's sums and gradient; returns the largest difference to the engine."""
        section, temperature, most = self.config.algorithm, self.config.rollout.temperature, 0.0
        rows = [self._log_distribution("actor", answer, t) for t in answer.trained]
        tokens = []
        for t, row in zip(answer.trained, rows, strict=True):
            now, entropy = float(row[answer.tokens[t]]), -float((np.exp(row) * row).sum())
            tokens.append(
                Token(now, answer.old.get(t, now), answer.engine[t], answer.reference.get(t), advantages[t], entropy)
            )
        terms = LOSSES[section.name](tokens, section)
        weights = corrections(tokens, section.rollout_correction)
        for t, row, token, term, (weight, outside) in zip(answer.trained, rows, tokens, terms, weights, strict=True):
            kl, kl_slope = 0.0, 0.0
            if token.reference is not None and section.kl.placement == "loss":
                kl, kl_slope = kl_term(token.log_prob, token.reference, section.kl.estimator)
                _add(sums, "kl", kl, share)
                if section.kl.estimator == "k3":
                    _add(sums, "kl_clip_fraction", float(kl == 10.0), share)
                    self.counts["tokens whose KL is bounded"] += kl == 10.0
            loss = weight * term.loss + self._coefficient * kl - section.entropy_coefficient * token.entropy
            slope = weight * term.slope + self._coefficient * kl_slope
            self.counts["clipped tokens"] += term.clipped
            self.counts["dual-clipped tokens"] += term.dual_clipped
            self.counts["tokens with a bounded weight"] += outside
            _add(sums, "loss", loss, share)
            _add(sums, "policy_loss", weight * term.loss, share)
            _add(sums, "clip_fraction", float(term.clipped), share)
            _add(sums, "entropy", token.entropy, share)
            if section.rollout_correction.method != "none":
                _add(sums, "rollout_correction_weight", weight, share)
                _add(sums, "rollout_correction_fraction", float(outside), share)
            if section.dual_clip is not None and LOSSES[section.name] is LOSSES["grpo"]:
                _add(sums, "dual_clip_fraction", float(term.dual_clipped), share)
            if answer.fresh:
                _add(sums, "logprob_diff_mean", abs(token.old - token.engine), share)
                _add(sums, "mismatch_k1", token.engine - token.old, share)
                _add(sums, "mismatch_kl", kl_term(token.engine, token.old, "k3")[0], share)
                most = max(most, abs(token.old - token.engine))
            _add(sums, "", 1.0, share)
            # d log p(y) / d x_j = [j = y] - p_j, d H / d x_j = -p_j (log p_j + H), where x are logits / temperature
            probability = np.exp(row)
            by_row = -slope * probability + section.entropy_coefficient * probability * (row + token.entropy)
            by_row[answer.tokens[t]] += slope
            self._add_gradient(gradient, answer, t, by_row * share / temperature)
        return most

    def _update_critic(self, expected: Expected, estimate: Estimate, minibatches: list[list[int]]) -> None:
        """The critic's updates towards the returns."""
        section, means = self.config.critic, []
        rate = learning_rate(section.optimizer, self._trained_steps["critic"], self.config.train.steps)
        self._trained_steps["critic"] += 1
        for ids in minibatches:
            gradient = {name: np.zeros_like(table) for name, table in self.tables["critic"].items()}
            weights, denominator = self._weights(expected.answers, ids)
            sums: Sums = {"loss": 0.0}
            for i in ids:
                answer = expected.answers[i]
                for t in answer.trained:
                    value, target, share = self._value(answer, t), estimate.returns[i][t], weights[i] / denominator
                    term = value_term(value, answer.values[t], target, section.value_clip)
                    _add(sums, "loss", term.loss, share)
                    _add(sums, "clip_fraction", float(term.clipped), share)
                    _add(sums, "value_mean", value, share)
                    _add(sums, "return_mean", target, share)
                    _add(sums, "", 1.0, share)
                    self._add_gradient(gradient, answer, t, np.array([term.slope * share]))
                    self.counts["clipped values"] += term.clipped
            expected.gradients["critic"].append(gradient)
            if self._applied("critic", gradient, rate):
                means.append({**_means(sums), "grad_norm": norm_of(gradient)})
        skipped = float(len(minibatches) - len(means))
        metrics = {**_mean_of(means), "learning_rate": rate, "skipped_updates": skipped}
        expected.metrics |= {f"critic/{name}": value for name, value in metrics.items()}

    def _applied(self, model: str, gradient: Tables, rate: float) -> bool:
        """Makes the update, unless its gradient is a spike."""
        norm, former = norm_of(gradient), self._norms[model]
        skipped = is_spike(norm, former, self.config.train.max_grad_norm_ratio)
        former.append(norm)
        self.counts["skipped updates"] += skipped
        if not skipped:
            self._adam[model].step(self.tables[model], gradient, rate)
        return not skipped

    def _add_gradient(self, gradient: Tables, answer: Answer, t: int, by_row: np.ndarray) -> None:
        """Adds to the two rows that the prediction of token t reads."""
        place = len(answer.prompt) + t - 1
        gradient["context"][([*answer.prompt, *answer.tokens])[place]] += by_row
        gradient["position"][place % POSITIONS] += by_row

    def _steer(self, expected: Expected, answers: list[Answer]) -> None:
        """The adaptive KL coefficient: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2."""
        kl = self.config.algorithm.kl
        if self._kl_in_reward:
            every = [
                kl_term(answer.old[t], answer.reference[t], kl.estimator)[0]
                for answer in answers
                for t in answer.trained
            ]
            expected.metrics["kl"] = sum(every) / max(len(every), 1)
        if kl.target is None or not self._has_reference:
            return
        self.counts["steps of the critic alone, with a target KL"] += "loss" not in expected.metrics
        if "loss" not in expected.metrics:
            return  # nothing steers by a policy that does not move
        expected.metrics["kl_coefficient"] = self._coefficient
        error = min(max(expected.metrics["kl"] / kl.target - 1, -0.2), 0.2)
        self._coefficient *= max(1 + error * len(answers) / kl.horizon, 0.1)


def _add(sums: Sums, name: str, value: float, share: float) -> None:
    """Adds to the weighted sum of a metric, and to the sum of its weights."""
    sums[name] = sums.get(name, 0.0) + share * value
    sums[f"{name}/weight"] = sums.get(f"{name}/weight", 0.0) + share


def _means(sums: Sums) -> Sums:
    """Losses as they are, of the loss's denominator; means over tokens of all other metrics."""
    found = {}
    for name, value in sums.items():
        if name and "/" not in name:
            found[name] = value if name in ("loss", "policy_loss") else value / sums[f"{name}/weight"]
    return found


def _mean_of(updates: list[Sums]) -> Sums:
    """The mean over the updates of a step with a token that has the metric."""
    found: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _zeros(estimate: Estimate) -> float:
    """Share of the responses trained on that have no advantage."""
    trained = [response for response in estimate.advantages if response]
    return sum(not any(response.values()) for response in trained) / len(trained)


def _sample_metrics(answers: list[Answer]) -> Sums:
    """Rewards and lengths."""
    rewards, lengths = [answer.reward for answer in answers], [sum(answer.sampled) for answer in answers]
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/score": sum(answer.parts["score"] for answer in answers) / len(answers),
        "reward/overlong": sum(answer.parts["overlong"] for answer in answers) / len(answers),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": max(lengths),
        "response/truncated_fraction": sum(answer.truncated for answer in answers) / len(answers),
        "rollout/completion_tokens": sum(lengths),
        "tokens": sum(len(answer.prompt) + len(answer.tokens) for answer in answers),
    }


def _counts(answers: list[Answer]) -> dict[str, int]:
    """Number of responses of each kind."""
    kinds: dict[str, Callable[[Answer], bool]] = {
        "responses": lambda answer: True,
        "with several turns": lambda answer: not all(answer.sampled),
        "truncated": lambda answer: answer.truncated,
        "masked as truncated": lambda answer: not answer.trained,
        "of an earlier policy": lambda answer: not answer.fresh,
        "of several policies": lambda answer: len(set(answer.versions)) > 1,
    }
    return {
        **{name: sum(map(holds, answers)) for name, holds in kinds.items()},
        "groups of one": sum(len(others_of(answers, answer)) == 1 for answer in answers),
    }


def _copied(tables: Tables) -> Tables:
    return {name: table.copy() for name, table in tables.items()}

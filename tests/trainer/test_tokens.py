"""What a step learns of each token of given samples, computed by hand: other tests compare layouts, which would all be
wrong in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.algo import find_algorithm
from rlhpc.api import Sample, TokenStats, TrainStats
from rlhpc.config.schema import RunConfig
from rlhpc.data.packing import PackPlan, pack
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.trainer import advantages
from rlhpc.trainer.advantages import step_advantages, token_values
from rlhpc.trainer.batches import Batching, filled, packed, token_weights
from rlhpc.trainer.roles import Models, Role
from rlhpc.trainer.step import zero_fraction
from rlhpc.trainer.update import logprob_diffs_of, means_of, policy_loss, step_metrics

pytestmark = pytest.mark.heavy  # the trainer's modules take seconds to be imported


def make_sample(group: int, prompt: int, reward: float, response_mask: list[bool] | None, response: int) -> Sample:
    return Sample(
        prompt_id=70 + group,
        group_id=group,
        tokens=np.arange(prompt + response, dtype=np.int32),
        prompt_len=prompt,
        log_probs=np.full(response, -2.0, np.float32),
        reward=reward,
        policy_version=1,
        truncated=False,
        response_mask=None if response_mask is None else np.array(response_mask),
    )


# Two answers to one prompt, the first with a token in its middle that it was given.
SAMPLES = [make_sample(0, 2, 1.0, [True, False, True], 3), make_sample(0, 1, 0.0, None, 2)]


def make_config(algorithm: dict[str, Any], **more: Any) -> RunConfig:
    sections = {"name": "x", "model": {"path": "m"}, "train": {"steps": 1}, "algorithm": algorithm, **more}
    return RunConfig.model_validate(sections)


def make_role(model: Any = None, dp: int = 1, tokens: int = 64) -> Any:
    """A rank of a model, whose microbatches are balanced by their tokens alone."""

    class Plain(Role):
        def pack(self, lengths: Sequence[int], minibatches: int = 1, *, gradient: bool = True) -> tuple[PackPlan, ...]:
            return pack(lengths, dp, tokens, minibatches)

    return Plain(model, rank=0, tokens_per_microbatch=tokens, tokens_without_gradient=tokens)


def rows(values: Any) -> list[list[float]]:
    return [pytest.approx(row.tolist()) for row in values]


def advantages_of(algorithm: dict[str, Any], greedy: tuple[Sample, ...] = (), **values: list[list[float]]) -> Any:
    section = make_config(algorithm).algorithm
    arrays = {name: [np.array(row, np.float32) for row in found] for name, found in values.items()}
    return step_advantages(find_algorithm(section), section, SAMPLES, greedy, arrays)


def test_given_tokens_have_no_advantage() -> None:
    found = advantages_of({"name": "grpo", "normalise_std": False})
    assert rows(found.advantages) == [[0.5, 0, 0.5], [-0.5, -0.5]]
    assert (found.returns, found.divergence) == (None, None)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_the_share_of_zero_advantages_is_of_the_samples_trained_on(name: str) -> None:
    """Of two groups of six, one of equal rewards that no sum of them gives back; a sample of the other is masked."""
    section = make_config({"name": name, "kl": {"coefficient": 0.0}}).algorithm
    rewards = [0.1] * 6 + [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]

    def fraction(*masked: int) -> float:
        masks = [[False] * 2 if number in masked else None for number in range(12)]
        samples = [make_sample(number // 6, 1, rewards[number], masks[number], 2) for number in range(12)]
        return zero_fraction(samples, step_advantages(find_algorithm(section), section, samples, [], {}))

    assert fraction() == 0.5
    assert fraction(11) == pytest.approx(6 / 11)
    assert fraction(0, 11) == 0.5
    assert fraction(*range(6, 12)) == 1


def test_a_penalty_is_taken_from_the_tokens_that_were_chosen() -> None:
    found = advantages_of(
        {"name": "rloo", "kl": {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}},
        old_log_probs=[[-1.0, -9.0, -2.0], [-1.0, -1.0]],
        reference_log_probs=[[-1.5, 0.0, -1.0], [-1.0, -2.0]],
    )
    # 1 - 0.5 (0.5 - 1) against 0 - 0.5 (0 + 1)
    assert rows(found.advantages) == [[1.75, 0, 1.75], [-1.75, -1.75]]
    assert found.divergence == pytest.approx((0.5 - 1 + 0 + 1) / 4)


def test_the_greedy_response_to_the_same_prompt_is_the_baseline() -> None:
    others = tuple(make_sample(group, 1, reward, None, 1) for group, reward in ((1, 9.0), (0, 0.25)))
    found = advantages_of({"name": "remax", "kl": {"coefficient": 0.0}}, greedy=others)
    assert rows(found.advantages) == [[0.75, 0, 0.75], [-0.25, -0.25]]


def test_a_critic_learns_the_returns() -> None:
    found = advantages_of({"name": "ppo", "kl": {"coefficient": 0.0}}, old_values=[[0.5, 9.0, 0.5], [0.5, 0.5]])
    assert rows(found.returns) == [[1, 0, 1], [0, 0]]
    assert np.concatenate(found.advantages)[[0, 2, 3, 4]].mean() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [("token-mean", (1, 1), 4), ("sequence-mean", (0.5, 0.5), 2), ("constant", (1, 1), 2 * 1024)],
)
def test_given_tokens_have_no_share_in_a_mean(aggregation: str, weights: tuple[float, float], denominator: int) -> None:
    batching = Batching.of(make_config({"aggregation": aggregation}))
    shares, found = token_weights(batching, PackPlan(64, (((0, 1),),), (8,)), SAMPLES)
    assert (shares, found) == ({0: weights[0], 1: weights[1]}, denominator)
    tokens = {"advantages": [np.array([1, 2, 3], np.float32), np.array([4, 5], np.float32)]}
    batch = packed(make_role(), SAMPLES, shares, tokens, (0, 1))
    one, other = weights
    assert batch.loss_weight.tolist() == [0, one, 0, one, 0, other, other, 0]
    assert batch.extra["advantages"].tolist() == [0, 1, 2, 3, 0, 4, 5, 0]


def test_losses_are_divided_by_the_denominator_and_all_else_by_weights() -> None:
    sums = {"loss": 6.0, "policy_loss": 4.0, "kl": 8.0, "weight": 4.0, "gap": 3.0, "gap/weight": 2.0, "max/gap": 9.0}
    assert means_of(sums, 2.0) == {"loss": 3.0, "policy_loss": 2.0, "kl": 2.0, "gap": 1.5}
    assert means_of({"loss": 0.0, "gap": 0.0, "gap/weight": 0.0, "weight": 0.0}, 1.0) == {"loss": 0.0}


def test_an_update_without_fresh_tokens_does_not_lower_their_mean() -> None:
    """With replay, a minibatch may have none: the difference of engine and trainer would seem smaller than it is."""

    def stats(gap: float, compared: float) -> TrainStats:
        return TrainStats(1.0, {"loss": 4.0, "weight": 2.0, "gap": gap, "gap/weight": compared, "max/gap_max": gap})

    metrics = step_metrics([(stats(0.0, 0.0), 2.0), (stats(3.0, 2.0), 2.0), (stats(1.0, 2.0), 2.0)])
    assert metrics == {"loss": 2.0, "gap": 1.0, "gap_max": 3.0, "grad_norm": 1.0, "skipped_updates": 0.0}


def test_engine_and_trainer_are_compared_where_both_had_the_same_weights() -> None:
    section = make_config({"kl": {"coefficient": 0.0}}).algorithm
    tokens = {
        "engine_log_probs": [sample.log_probs for sample in SAMPLES],
        "old_log_probs": [np.array([-2.5, 50, -2], np.float32), np.array([-9, -9], np.float32)],
        "advantages": [np.zeros(3, np.float32), np.zeros(2, np.float32)],
        "fresh": [np.ones(3, np.float32), np.zeros(2, np.float32)],
    }
    batch = packed(make_role(), SAMPLES, {0: 1.0, 1: 1.0}, tokens, (0, 1))
    stats = TokenStats(torch.zeros(8, requires_grad=True), torch.ones(8, requires_grad=True))
    metrics = policy_loss(stats, batch, find_algorithm(section), section).metrics
    assert (float(metrics["logprob_diff_mean"]), float(metrics["logprob_diff_mean/weight"])) == (0.5, 2)
    assert (float(metrics["max/logprob_diff_max"]), float(metrics["weight"])) == (0.5, 4)
    assert float(metrics["entropy"]) == 4
    counts = logprob_diffs_of([{name: float(value) for name, value in metrics.items()}] * 2)
    assert counts is not None
    assert (counts.values, sum(counts.counts)) == (4, 4), "two tokens in each of two updates"
    filled = [(low, high) for low, high, count in counts.bins if count]
    assert filled[0][0] == pytest.approx(1e-7), "0 is in the first bin"
    assert filled[1][0] < 0.5 < filled[1][1]


def test_the_distance_of_a_truncated_policy_is_measured() -> None:
    """Its log-probs are the trainer's minus the logarithm of the kept probability."""
    section = make_config({"kl": {"coefficient": 0.0}}).algorithm
    cut = [np.array([0.1, 50, 0.4], np.float32), np.array([0.2, 9], np.float32)]  # -ln Z; the second token is a tool's
    whole = [sample.log_probs for sample in SAMPLES]
    tokens = {
        "engine_log_probs": [one + other for one, other in zip(whole, cut, strict=True)],
        "old_log_probs": whole,
        "advantages": [np.zeros(3, np.float32), np.zeros(2, np.float32)],
        "fresh": [np.ones(3, np.float32), np.array([1, 0], np.float32)],
    }
    batch = packed(make_role(), SAMPLES, {0: 1.0, 1: 1.0}, tokens, (0, 1))
    stats = TokenStats(torch.zeros(8, requires_grad=True), torch.ones(8, requires_grad=True))
    metrics = policy_loss(stats, batch, find_algorithm(section), section).metrics
    assert float(metrics["mismatch_k1"]) == pytest.approx(0.1 + 0.4 + 0.2)
    assert float(metrics["mismatch_k1/weight"]) == 3
    less = tokens | {"engine_log_probs": [one - other for one, other in zip(whole, cut, strict=True)]}
    batch = packed(make_role(), SAMPLES, {0: 1.0, 1: 1.0}, less, (0, 1))
    metrics = policy_loss(stats, batch, find_algorithm(section), section).metrics
    assert float(metrics["mismatch_k1"]) == pytest.approx(-0.7), "it has a sign"


def test_a_first_update_has_a_gradient_without_a_pass_before_it() -> None:
    """Its own log-probs are the old ones, and the ratio of both is 1, but no constant."""
    section = make_config({"kl": {"coefficient": 0.0}}).algorithm
    tokens = {
        "engine_log_probs": [sample.log_probs for sample in SAMPLES],
        "advantages": [np.array([1, 2, 3], np.float32), np.array([-4, 5], np.float32)],
    }
    batch = packed(make_role(), SAMPLES, {0: 1.0, 1: 0.5}, tokens, (0, 1))
    log_probs = torch.full((8,), -2.0, requires_grad=True)
    policy_loss(TokenStats(log_probs, torch.ones(8)), batch, find_algorithm(section), section).total.backward()
    assert log_probs.grad.tolist() == [0, -1, 0, -3, 0, 2, -2.5, 0]


@pytest.mark.parametrize(
    ("algorithm", "train", "reference", "taken"),
    [
        ({}, {}, True, {"reference_log_probs": "reference"}),
        ({}, {}, False, {}),
        ({}, {"minibatches": 2}, False, {"old_log_probs": "actor"}),
        ({}, {"epochs": 2}, True, {"old_log_probs": "actor", "reference_log_probs": "reference"}),
        ({"placement": "reward"}, {}, True, {"old_log_probs": "actor", "reference_log_probs": "reference"}),
    ],
)
def test_log_probs_are_taken_of_the_models_that_are_asked(
    monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, str], train: dict[str, int], reference: bool, taken: Any
) -> None:
    config = make_config({"kl": {"coefficient": 0.1, **algorithm}}, train={"steps": 1, **train})
    actor, frozen = make_role(Trained()), make_role(Trained())
    names = {id(actor): "actor", id(frozen): "reference"}
    monkeypatch.setattr(advantages, "forward_batches", lambda role, batching, samples: [])
    monkeypatch.setattr(advantages, "of_samples", lambda role, *rest: names[id(role)])
    models = Models(actor, reference=frozen if reference else None)
    found = advantages.token_values(models, Batching.of(config), SAMPLES, 1.0)
    engine = {"engine_log_probs": [sample.log_probs for sample in SAMPLES]}
    assert found == {**engine, **taken}


def test_log_probs_that_engines_have_computed_are_those_of_trained_tokens() -> None:
    """A token that is not trained on has 0, as after a pass of the trainers; a sample without any is an error."""
    batching = Batching.of(make_config({"kl": {"coefficient": 0.1}}))
    given = [np.array([-1, -2, -3], np.float32), np.array([-4, -5], np.float32)]
    samples = [replace(s, reference_log_probs=values) for s, values in zip(SAMPLES, given, strict=True)]
    found = token_values(Models(make_role(Trained())), batching, samples, 1.0)["reference_log_probs"]
    assert [values.tolist() for values in found] == [[-1, 0, -3], [-4, -5]]
    with pytest.raises(AssertionError, match="has no log-probs of the reference"):
        token_values(Models(make_role(Trained())), batching, [samples[0], SAMPLES[1]], 1.0)


class Trained:
    """Stands for a back end of one rank: remembers its updates, whose numbers rise."""

    def __init__(self) -> None:
        self.updates: list[tuple[Any, float, float]] = []
        self.layout = ParallelLayout(1)
        self.applied: tuple[bool, ...] = ()  # of the first updates; later ones are

    def offload(self) -> None:
        pass

    def train(
        self, batches: Any, loss: Any, denominator: float, temperature: float, rate: float, *_: Any
    ) -> TrainStats:
        self.updates.append((batches, denominator, rate))
        n = len(self.updates)
        return TrainStats(
            3.0 * n,
            {"loss": 8.0 * n, "entropy": 4.0 * n, "weight": 4.0, "max/gap": 3.0 - n},
            {"load": n},
            applied=all(self.applied[n - 1 : n]),
        )


def test_micro_batches_are_filled_up_with_blank_ones() -> None:
    batches = filled([(1,), (), (0,), ()], lambda ids: packed(make_role(), SAMPLES, {0: 1, 1: 1}, {}, ids))
    assert [batch.sample_ids for batch in batches] == [(1,), (0,), (), ()]


def test_histograms_are_of_what_is_trained_on() -> None:
    """The second token of the first response is a tool's."""
    from rlhpc.trainer.step_histograms import step_histograms

    advantages = [np.array([1, 50, 3], np.float32), np.array([-4, 5], np.float32)]
    found = {name: value for name, value in step_histograms(SAMPLES, advantages).items() if value is not None}
    ranges = {name: (value.low, value.high, value.values) for name, value in found.items()}
    assert ranges == {"response/length": (2, 3, 2), "reward": (0, 1, 2), "advantage": (-4, 5, 4)}

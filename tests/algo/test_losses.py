"""Losses by finite differences, and their sums however a batch is divided."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlhpc.algo import ALGORITHMS, find_algorithm
from rlhpc.algo.losses import (
    Clip,
    clipped_surrogate,
    importance_weights,
    negative_log_likelihood,
    sequence_surrogate,
    shares,
    value_loss,
    weighted_log_likelihood,
)
from rlhpc.config.algorithm import AlgorithmSection, RolloutCorrectionSection
from rlhpc.data.collate import pack_batch
from rlhpc.data.packing import pack

# What is differentiated as if it were constant: the ratio that weighs CISPO's log-likelihood, GSPO's in part.
_TRUE_GRADIENTS = [name for name in ALGORITHMS if name not in ("cispo", "gspo")]


def random_tokens(count: int, sequences: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    log_probs = -draw(1.0).abs()
    return {
        "log_probs": log_probs,
        "old_log_probs": log_probs + draw(0.3),
        "engine_log_probs": log_probs + draw(0.3),
        "reference_log_probs": log_probs + draw(0.3),
        "advantages": draw(1.0),
        "entropy": draw(1.0).abs(),
        "weight": (draw(1.0) > -1).double() * 0.5,
        "sequence": torch.arange(count) * sequences // count,
    }


@pytest.mark.parametrize("name", _TRUE_GRADIENTS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    section = AlgorithmSection(
        name=name,
        dual_clip=2.0,
        entropy_coefficient=0.1,
        kl={"coefficient": 0.2, "placement": "loss"},
        rollout_correction=RolloutCorrectionSection(method="truncate", high=1.2),
    )
    tokens = random_tokens(24, 4)
    inputs = tuple(tokens.pop(key).requires_grad_() for key in ("log_probs", "entropy"))

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        both = {"log_probs": log_probs, "entropy": entropy}
        return find_algorithm(section).loss({**tokens, **both}, section)["loss"]

    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-6)


def test_gspos_gradient_is_that_of_the_sequence_ratio() -> None:
    """With one advantage a response, of -A times the geometric mean of its tokens' ratios, times its tokens."""
    tokens = random_tokens(12, 3)
    sequence, ones = tokens["sequence"], torch.ones(12, dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    log_probs = tokens["log_probs"].requires_grad_()
    terms = sequence_surrogate(log_probs, tokens["old_log_probs"], advantages[sequence], ones, sequence, Clip(1.0, 1e9))
    (found,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    means = (log_probs - tokens["old_log_probs"]).view(3, 4).mean(1)
    (expected,) = torch.autograd.grad(-(advantages * means.exp() * 4).sum(), log_probs)
    torch.testing.assert_close(found, expected)


def test_cispos_gradient_is_the_policy_gradient_times_a_bounded_ratio() -> None:
    section = AlgorithmSection(name="cispo", clip_low=0.2, clip_high=0.2)
    tokens = random_tokens(12, 3)
    log_probs = tokens["log_probs"].requires_grad_()
    (found,) = torch.autograd.grad(find_algorithm(section).loss(tokens, section)["policy_loss"], log_probs)
    ratio = (log_probs - tokens["old_log_probs"]).detach().exp().clamp(0.8, 1.2)
    torch.testing.assert_close(found, -ratio * tokens["advantages"] * tokens["weight"])
    assert (found[tokens["weight"] > 0] != 0).all()


def test_the_value_loss_holds_back_what_left_the_old_values_behind() -> None:
    values = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    sums = value_loss(values, torch.tensor([1.0, 3.0, 0.0]), torch.zeros(3), torch.tensor([1.0, 0.5, 0.5]), clip=0.2)
    assert float(sums.loss.detach()) == pytest.approx(0.5 * (0.64 + 0.5 * 2.8**2 + 0.5 * 0.01))
    assert float(sums.clipped) == 1.5
    sums.loss.backward()
    assert values.grad.tolist() == pytest.approx([0, 0, 0.05])
    free = value_loss(values, torch.tensor([1.0, 3.0, 0.0]), torch.zeros(3), torch.ones(3), clip=None)
    assert float(free.loss.detach()) == pytest.approx(0.5 * (4 + 0.01))


@pytest.mark.parametrize(
    ("difference", "bounded"), [(50.0, [20, 20, 20, 10]), (-50.0, [-20, -20, -20, -50])], ids=["risen", "fallen"]
)
def test_the_exponents_of_ratios_are_bounded(difference: float, bounded: list[float]) -> None:
    """Of a token's at 20, of a whole response's at 10 and above alone: the field's numbers."""
    now, one = torch.full((1,), -60.0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    old, sequence, wide = (
        now - difference,
        torch.zeros(1, dtype=torch.int64),
        RolloutCorrectionSection(method="truncate", high=1e12),
    )
    advantage = -one if difference > 0 else one  # what the clip does not hold
    ratios = [
        clipped_surrogate(now, old, advantage, Clip(0.2, 0.2)).loss,
        weighted_log_likelihood(now, old, advantage, Clip(1.0, 1e12)).loss / now,
        importance_weights(now, old, one, sequence, wide).weights,
        sequence_surrogate(now, old, advantage, one, sequence, Clip(0.2, 0.2)).loss,
    ]
    assert [float(ratio.abs().log()) for ratio in ratios] == pytest.approx(bounded)


def test_the_supervised_loss_falls_as_its_tokens_become_likelier() -> None:
    assert float(negative_log_likelihood(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))) == 2.0


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])  # the other algorithms have GRPO's loss
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_a_loss_does_not_depend_on_how_its_batch_is_divided(name: str, aggregation: str) -> None:
    """Over ranks and microbatches of random plans: the same loss and gradients as the whole batch in one."""
    for seed in range(3):
        draw = random.Random(seed)
        numbers = np.random.default_rng(seed)
        sizes = [(draw.randint(1, 5), draw.randint(1, 9)) for _ in range(draw.randint(4, 24))]
        mask = RolloutCorrectionSection(method="mask", level="sequence")
        section = AlgorithmSection(name=name, aggregation=aggregation, rollout_correction=mask)
        fields = ("log_probs", "old_log_probs", "engine_log_probs", "reference_log_probs", "advantages", "entropy")
        values = [{key: numbers.standard_normal(length) * 0.3 for key in fields} for _, length in sizes]
        lengths = [sum(size) for size in sizes]
        whole = _loss(section, sizes, values, [[range(len(sizes))]])
        for dp, capacity in ((1, 20), (2, 14), (4, 10**6)):
            (plan,) = pack(lengths, dp, capacity)
            divided = _loss(section, sizes, values, plan.bins)
            assert divided[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
            for mine, theirs in zip(divided[1], whole[1], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def _loss(section: AlgorithmSection, sizes: list, values: list, ranks: object) -> tuple[float, list[torch.Tensor]]:
    """The loss summed over ranks' microbatches, as the trainer divides it; and each sample's gradient."""
    share = shares([length for _, length in sizes], section.aggregation, constant=11)
    total, gradients = 0.0, [torch.zeros(length) for _, length in sizes]
    for ids in (members for rank in ranks for members in rank):
        sequences = [(np.zeros(sum(sizes[i]), dtype=np.int32), sizes[i][0]) for i in ids]
        batch = pack_batch(
            sequences,
            sample_ids=tuple(ids),
            weights=[share.weights[i] for i in ids],
            per_token={key: [values[i][key] for i in ids] for key in values[0]},
        )
        log_probs = batch.extra["log_probs"].requires_grad_()
        tokens = {**batch.extra, "log_probs": log_probs, "weight": batch.loss_weight, "sequence": batch.sequence}
        loss = find_algorithm(section).loss(tokens, section)["loss"] / share.denominator
        total += float(loss.detach())
        (gradient,) = torch.autograd.grad(loss, log_probs)
        for i, part in zip(ids, gradient.split([sum(sizes[i]) for i in ids]), strict=True):
            gradients[i] = part[sizes[i][0] - 1 : -1]
    return total, gradients


def test_shares_are_means_of_their_kinds() -> None:
    lengths = [2, 3, 1, 0]
    assert shares(lengths, "token-mean", 10).denominator == 6
    by_sequence = shares(lengths, "sequence-mean", 10)
    assert by_sequence.denominator == 3
    assert by_sequence.weights[:3] == (1 / 2, 1 / 3, 1)
    constant = shares(lengths, "constant", 10)
    assert (constant.weights[:3], constant.denominator) == ((1.0, 1.0, 1.0), 30)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_without_tokens_to_learn_from_a_mean_is_nothing(aggregation: str) -> None:
    assert shares([0, 0], aggregation, 10).denominator > 0

"""GRPO's mathematics against the field's numbers, finite differences and definitions."""

from __future__ import annotations

import math

import pytest
import torch

from rlhpc.algo import find_algorithm
from rlhpc.algo.advantages import group_relative
from rlhpc.algo.grpo import GRPO
from rlhpc.algo.losses import Clip, clipped_surrogate
from rlhpc.algo.objective import kl_divergence
from rlhpc.algo.schedule import learning_rate
from rlhpc.config.algorithm import AlgorithmSection, KLSection
from rlhpc.config.training import OptimizerSection
from rlhpc.core.errors import UserError

REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.5])
GROUPS = torch.tensor([7, 7, 3, 3])


def test_advantages_equal_the_fields_published_numbers() -> None:
    """Computed with verl 0.9.1 for these rewards, epsilon 1e-6."""
    normalised = group_relative(REWARDS, GROUPS, normalise_std=True, epsilon=1e-6)
    assert torch.allclose(normalised, torch.tensor([0.707106, -0.707106, 0.707105, -0.707105]), atol=1e-6)
    plain = group_relative(REWARDS, GROUPS, normalise_std=False, epsilon=1e-6)
    assert torch.equal(plain, torch.tensor([0.5, -0.5, 0.25, -0.25]))


def test_a_group_of_equal_rewards_has_no_advantage_and_neither_has_a_group_of_one() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 0.5]), torch.tensor([0, 0, 0, 1])
    assert group_relative(rewards, groups, normalise_std=True, epsilon=1e-6).tolist() == [0.0] * 4


def test_clip_has_separate_bounds_and_stops_the_gradient() -> None:
    old = torch.zeros(4)
    ratio = torch.tensor([1.5, 0.5, 1.25, 0.5])
    log_probs = ratio.log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0])
    terms = clipped_surrogate(log_probs, old, advantages, Clip(0.2, 0.28))
    # -min(A r, A clip(r)): 1.28 and -0.8 are clipped; 1.25 lies inside; a falling ratio of a good token is not held.
    assert terms.loss.tolist() == pytest.approx([-1.28, 0.8, -1.25, -0.5])
    assert terms.clipped.tolist() == [1, 1, 0, 0]
    terms.loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([0, 0, -1.25, -0.5])


def test_weights_scale_each_tokens_share() -> None:
    log_probs, weight = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.0])
    tokens = {
        "log_probs": log_probs,
        "old_log_probs": log_probs,
        "advantages": torch.tensor([2.0, 100.0]),
        "entropy": torch.tensor([0.4, 9.0]),
        "weight": weight,
    }
    sums = GRPO.loss(tokens, AlgorithmSection())
    assert float(sums["loss"]) == -1.0
    assert float(sums["entropy"]) == pytest.approx(0.2)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_average_to_the_true_divergence(estimator: str) -> None:
    """Over samples of the policy; k2 is biased by the third order of a small difference."""
    torch.manual_seed(0)
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.45, 0.33, 0.22]).log()
    exact = float((policy.exp() * (policy - reference)).sum())
    expected = float((policy.exp() * kl_divergence(policy, reference, estimator)).sum())
    assert expected == pytest.approx(exact, rel=0.05 if estimator == "k2" else 1e-4)
    if estimator != "k1":
        assert (kl_divergence(policy, reference, estimator) >= 0).all()


def test_loss_adds_kl_and_entropy_with_their_coefficients() -> None:
    section = AlgorithmSection(kl=KLSection(coefficient=0.1, estimator="k1"), entropy_coefficient=0.01)
    tokens = {
        "log_probs": torch.tensor([-1.0, -2.0]),
        "old_log_probs": torch.tensor([-1.0, -2.0]),
        "reference_log_probs": torch.tensor([-1.5, -2.0]),
        "advantages": torch.tensor([1.0, 1.0]),
        "entropy": torch.tensor([0.3, 0.7]),
        "weight": torch.ones(2),
    }
    sums = GRPO.loss(tokens, section)
    assert float(sums["loss"]) == pytest.approx(-2 + 0.1 * 0.5 - 0.01 * 1.0)
    assert float(sums["kl"]) == 0.5
    in_reward = section.model_copy(update={"kl": KLSection(coefficient=0.1, estimator="k1", placement="reward")})
    assert float(GRPO.loss(tokens, in_reward)["loss"]) == pytest.approx(-2 - 0.01 * 1.0), "it would count twice"


def test_the_dual_clip_bounds_a_bad_token_that_became_likely_and_tells_it() -> None:
    tokens = {
        "log_probs": torch.tensor([5.0, 5.0, 1.5]).log(),
        "old_log_probs": torch.zeros(3),
        "advantages": torch.tensor([-1.0, 1.0, -1.0]),
        "entropy": torch.zeros(3),
        "weight": torch.full((3,), 0.5),
    }
    sums = GRPO.loss(tokens, AlgorithmSection(clip_high=0.2, dual_clip=2.0))
    assert float(sums["loss"]) == pytest.approx(0.5 * (2 - 1.2 + 1.5))
    assert (float(sums["clip_fraction"]), float(sums["dual_clip_fraction"])) == (0.5, 0.5)


@pytest.mark.parametrize(("estimator", "placement"), [("k3", "loss"), ("k2", "loss"), ("k3", "reward")])
def test_tokens_whose_kl_is_bounded_have_no_gradient_and_are_counted(estimator: str, placement: str) -> None:
    """Beyond 10: where the reference's log-prob is more than 2.6 above the policy's, or 11 below."""
    kl = KLSection(coefficient=0.1, estimator=estimator, placement=placement)
    log_probs = torch.tensor([-5.0, -5.0, -5.0, -1.0, -1.0, -1.0], requires_grad=True)
    tokens = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "reference_log_probs": torch.tensor([-2.5, -2.3, -2.3, -11.9, -12.1, -40.0]),
        "advantages": torch.zeros(6),
        "entropy": torch.zeros(6),
        "weight": torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5, 0.5]),
    }
    sums = GRPO.loss(tokens, AlgorithmSection(kl=kl))
    if (estimator, placement) != ("k3", "loss"):
        assert "kl_clip_fraction" not in sums
        return
    sums["loss"].backward()
    assert (log_probs.grad == 0).tolist() == [False, True, True, False, True, True]
    assert float(sums["kl_clip_fraction"]) == 3 * 0.5
    assert not sums["kl_clip_fraction"].requires_grad


def test_reference_is_needed_only_for_a_kl_term() -> None:
    assert GRPO.needs_reference(AlgorithmSection())
    assert not GRPO.needs_reference(AlgorithmSection(kl=KLSection(coefficient=0)))


def test_algorithms_are_found_by_name_or_import_path() -> None:
    assert find_algorithm(AlgorithmSection()) is GRPO
    assert find_algorithm(AlgorithmSection(name="rlhpc.algo.grpo:GRPO")) is GRPO
    with pytest.raises(UserError, match=r"algorithm.name: unknown algorithm 'gpro'; did you mean .*'grpo'"):
        find_algorithm(AlgorithmSection(name="gpro"))
    with pytest.raises(UserError, match=r"is a function; name a value of type"):
        find_algorithm(AlgorithmSection(name="rlhpc.algo:find_algorithm"))


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_schedules_warm_up_and_come_down(schedule: str, middle: float, end: float) -> None:
    section = OptimizerSection(learning_rate=1.0, warmup_steps=10, schedule=schedule, final_fraction=0.1)
    rates = [learning_rate(section, step, 110) for step in range(111)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert rates[60] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(end)
    assert all(math.isfinite(rate) for rate in rates)

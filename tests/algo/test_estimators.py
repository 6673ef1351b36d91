"""Algorithms: estimators on ragged responses against their definitions, defaults, and names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlhpc.algo import ALGORITHMS, Responses, find_algorithm
from rlhpc.algo.advantages import discounted_returns, generalised, group_relative, leave_one_out, whiten
from rlhpc.algo.algorithm import accumulate_backwards
from rlhpc.algo.grpo import GRPO
from rlhpc.algo.losses import Clip, clipped_surrogate
from rlhpc.algo.objective import adapted_coefficient, kl_divergence, with_coefficient
from rlhpc.algo.schedule import learning_rate
from rlhpc.config.algorithm import DEFAULTS, AlgorithmSection, KLSection
from rlhpc.config.training import OptimizerSection
from rlhpc.core.errors import UserError


def responses(**fields: torch.Tensor) -> Responses:
    """Three of 2, 3 and 1 tokens, the last two of one group."""
    return Responses.of(
        torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64),
        torch.tensor([4, 9, 9]),
        torch.tensor([2, 3, 1]),
        **fields,
    )


def test_the_reward_is_at_the_last_token_that_the_policy_sampled() -> None:
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.float64)
    penalty = torch.tensor([0.1, 5.0, 0.2, 0.3, 5.0, 0.4], dtype=torch.float64)
    found = responses(mask=mask, penalty=penalty)
    assert found.token_rewards.tolist() == pytest.approx([0.9, 0, -0.2, -0.3, 0, 1.6])
    assert found.rewards.tolist() == pytest.approx([0.9, -0.5, 1.6])
    assert found.spread(torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64)).tolist() == [7, 0, 8, 8, 0, 9]


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_response_that_is_not_trained_on_counts_in_its_group(name: str) -> None:
    """As one that was cut off: the other one is compared with its reward, and it has no advantage itself."""
    lengths, groups, mask = torch.tensor([2, 3]), torch.tensor([0, 0]), torch.tensor([1.0, 1, 0, 0, 0])

    def other(reward: float) -> list[float]:
        found = Responses.of(
            torch.tensor([1.0, reward], dtype=torch.float64),
            groups,
            lengths,
            mask=mask.double(),
        )
        zeros = {"baselines": torch.zeros(2, dtype=torch.float64), "values": torch.zeros(5, dtype=torch.float64)}
        found = replace(found, **zeros)
        assert found.rewards.tolist() == [1.0, reward]
        section = AlgorithmSection(name=name, normalise_std=False)
        advantages = ALGORITHMS[name].advantage(found, section).advantages.tolist()
        assert advantages[2:] == [0, 0, 0]
        return advantages[:2]

    compares = name not in ("ppo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")  # or is whitened
    assert (other(-1.0) == other(0.5)) is not compares
    if compares:
        assert other(-1.0)[0] > other(0.5)[0]


@pytest.mark.heavy
def test_the_recurrence_equals_a_loop() -> None:
    torch.manual_seed(0)
    for lengths in ([5], [1, 1, 1], [3, 0, 17, 1, 64], [33, 32, 31]):
        total = sum(lengths)
        values, decay = torch.randn(total, dtype=torch.float64), torch.rand(total, dtype=torch.float64)
        expected, start = [], 0
        for length in lengths:
            row = [0.0] * length
            for t in reversed(range(length)):
                row[t] = float(values[start + t] + (decay[start + t] * row[t + 1] if t + 1 < length else 0.0))
            expected += row
            start += length
        found = accumulate_backwards(values, decay, torch.tensor(lengths))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_given_tokens_are_passed_over() -> None:
    """A response with a tool's answer in its middle has the advantages of one without it."""
    torch.manual_seed(0)
    own = torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.float64)
    rewards, values = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    whole = generalised(rewards, values, own, torch.tensor([6]), 0.9, 0.8)
    kept = own > 0
    short = generalised(rewards[kept], values[kept], torch.ones(4, dtype=torch.float64), torch.tensor([4]), 0.9, 0.8)
    torch.testing.assert_close(whole.advantages[kept], short.advantages)
    torch.testing.assert_close(whole.returns[kept], short.returns)
    assert (whole.advantages[~kept] == 0).all()
    returns = discounted_returns(rewards, own, torch.tensor([6]), 0.9)
    ones = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(returns[kept], discounted_returns(rewards[kept], ones, torch.tensor([4]), 0.9))


def test_gae_has_its_known_ends() -> None:
    """Lambda 1 is returns less values, lambda 0 the one-step error (Schulman et al. 2016, eq. 17 and 18)."""
    torch.manual_seed(0)
    rewards, values, ones = torch.randn(5), torch.randn(5), torch.ones(5)
    lengths = torch.tensor([2, 3])
    far = generalised(rewards, values, ones, lengths, 0.9, 1.0)
    torch.testing.assert_close(far.advantages, discounted_returns(rewards, ones, lengths, 0.9) - values)
    near = generalised(rewards, values, ones, lengths, 0.9, 0.0).advantages
    following = torch.tensor([values[1], 0, values[3], values[4], 0])
    torch.testing.assert_close(near, rewards + 0.9 * following - values)


@pytest.mark.heavy
@pytest.mark.parametrize("decay", [1.0, 0.9999])
def test_a_discount_near_1_is_exact_over_many_tokens(decay: float) -> None:
    """Of 20,000 tokens the first is discounted by 0.9999 to that power; in float32, 0.9999 is another number."""
    count, gamma = 20_000, 0.9999
    lengths, ones = torch.tensor([count]), torch.ones(count, dtype=torch.float64)
    rewards = torch.zeros(count, dtype=torch.float64)
    rewards[-1] = 1.0
    expected = [gamma ** (count - 1 - t) for t in range(count)]
    assert discounted_returns(rewards, ones, lengths, gamma).tolist() == pytest.approx(expected, rel=1e-9)
    found = generalised(rewards, torch.zeros_like(rewards), ones, lengths, gamma, decay)
    expected = [(gamma * decay) ** (count - 1 - t) for t in range(count)]
    assert found.advantages.tolist() == pytest.approx(expected, rel=1e-9)


def test_leave_one_out_is_what_it_says() -> None:
    rewards, groups = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1])
    assert leave_one_out(rewards, groups).tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0]


def test_whitened_values_have_mean_0_and_deviation_1_over_the_mask() -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(50, dtype=torch.float64) * 3 + 2, (torch.rand(50) > 0.3).double()
    found = whiten(values, mask)
    assert float(found.sum()) == pytest.approx(0, abs=1e-12)
    assert float(found[mask > 0].std()) == pytest.approx(1, abs=1e-6)
    assert whiten(torch.tensor([3.0]), torch.ones(1)).tolist() == [3.0]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_give_no_advantage_and_better_ones_do(name: str) -> None:
    """Over two groups of four: advantages point from the worse to the better response of a prompt."""
    section = AlgorithmSection(name=name)
    groups, lengths = torch.arange(2).repeat_interleave(4), torch.tensor([3, 1, 2, 4] * 2)

    def advantages(rewards: list[float]) -> torch.Tensor:
        given = torch.tensor(rewards, dtype=torch.float64)
        doubles = {"dtype": torch.float64}
        more = {"baselines": torch.ones(8, **doubles), "values": torch.full((20,), 0.5, **doubles)}
        found = replace(Responses.of(given, groups, lengths), **more)
        estimate = find_algorithm(section).advantage(found, section)
        assert len(estimate.advantages) == 20
        return estimate.advantages

    assert (advantages([1.0] * 8).abs() < 1e-6).all()
    raised = advantages([2.0, 0, 0, 0, 2.0, 0, 0, 0])
    assert (raised[[0, 1, 2]] > 0).all()
    assert (raised[[3, 4, 5]] < 0).all()


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "ppo"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -1e-3])
def test_equal_rewards_have_an_advantage_of_exactly_zero(name: str, reward: float) -> None:
    """Though their sum over their number is another number: 0.1, of a group of 6 or 10, by the last bit."""
    sizes = torch.tensor([6, 10, 3])
    groups = torch.arange(3).repeat_interleave(sizes)
    rewards, lengths = torch.full((19,), reward, dtype=torch.float64), torch.arange(19) % 5 + 1
    found = replace(Responses.of(rewards, groups, lengths), baselines=rewards)
    section = AlgorithmSection(name=name, kl={"coefficient": 0.0})
    assert not find_algorithm(section).advantage(found, section).advantages.any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_response_that_is_left_alone_has_no_advantage(name: str) -> None:
    """As one whose group lost all others to a failed reward: there is nothing to compare it with. Whitening, over the
    whole batch, moves it with those of equal rewards."""
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    found, section = Responses.of(rewards, groups, torch.tensor([1, 1, 1, 2])), AlgorithmSection(name=name)
    advantages = find_algorithm(section).advantage(found, section).advantages
    assert advantages[0] > 0
    assert advantages[1] < 0
    assert advantages[3:].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_ppo_whitens_advantages_and_trains_its_critic_on_the_returns() -> None:
    values = torch.tensor([0.5, 0.1, -0.3, 0.2, 0.0, 0.7], dtype=torch.float64)
    found, section = replace(responses(), values=values), AlgorithmSection(name="ppo", gamma=0.9, gae_lambda=1.0)
    estimate = find_algorithm(section).advantage(found, section)
    ones = torch.ones(6, dtype=torch.float64)
    returns = discounted_returns(found.token_rewards, ones, found.lengths, 0.9)
    torch.testing.assert_close(estimate.returns, returns)
    torch.testing.assert_close(estimate.advantages, whiten(returns - values, ones))


def test_every_algorithm_has_a_name_and_defaults() -> None:
    assert set(ALGORITHMS) == set(DEFAULTS)
    assert all(algorithm.name == name for name, algorithm in ALGORITHMS.items())


def test_models_and_responses_beyond_the_policys_are_asked_for_where_they_are_used() -> None:
    assert [name for name, algorithm in ALGORITHMS.items() if algorithm.needs_critic] == ["ppo"]
    assert [name for name, algorithm in ALGORITHMS.items() if algorithm.needs_greedy] == ["remax"]


def test_defaults_are_the_algorithms_own_and_give_way() -> None:
    assert AlgorithmSection().model_dump() == AlgorithmSection(name="grpo").model_dump()
    assert AlgorithmSection(name="dapo").clip_high == 0.28
    assert AlgorithmSection(name="dapo", clip_high=0.3).clip_high == 0.3
    rloo = AlgorithmSection(name="rloo", kl={"coefficient": 0.5}).kl
    assert (rloo.coefficient, rloo.estimator, rloo.placement) == (0.5, "k1", "reward")
    dumped = AlgorithmSection(name="gspo", clip_low=0.1)
    assert AlgorithmSection.model_validate(dumped.model_dump()) == dumped


def test_the_coefficient_rises_above_the_target_and_falls_below_it() -> None:
    section = KLSection(coefficient=0.1, target=0.05, horizon=1000)
    assert adapted_coefficient(0.1, 0.055, 100, section) == pytest.approx(0.1 * 1.01)
    assert adapted_coefficient(0.1, 5.0, 100, section) == pytest.approx(0.1 * 1.02)  # bounded
    assert adapted_coefficient(0.1, 0.0, 100, section) == pytest.approx(0.1 * 0.98)
    assert adapted_coefficient(0.1, 0.0, 8000, section) == pytest.approx(0.1 * 0.1), "not below nothing"
    assert adapted_coefficient(0.1, 9.0, 100, KLSection(coefficient=0.1)) == 0.1
    changed = with_coefficient(AlgorithmSection(kl=section), 0.7)
    assert changed.kl.coefficient == 0.7
    assert changed.kl.target == 0.05
    assert math.isclose(section.coefficient, 0.1)


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

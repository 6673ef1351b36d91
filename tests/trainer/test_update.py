"""What an update makes of a step's samples, and what a step counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from rlhpc.algo import find_algorithm
from rlhpc.api import RunState, Sample, TrainStats
from rlhpc.config.schema import RunConfig
from rlhpc.trainer import skipped
from rlhpc.trainer.advantages import StepAdvantages
from rlhpc.trainer.batches import Batching, update_plans
from rlhpc.trainer.roles import Models
from rlhpc.trainer.run import Run
from rlhpc.trainer.step import adapt_coefficient, current_section, take_step
from rlhpc.trainer.update import Updater, step_metrics
from tests.trainer.test_tokens import SAMPLES, Trained, make_config, make_role, make_sample

pytestmark = pytest.mark.heavy  # the trainer's modules take seconds to be imported


def make_updater(config: RunConfig, critic: Any = None) -> Any:
    """An updater whose actor remembers its updates."""
    nowhere = cast(Any, None)  # nothing is skipped
    models = Models(make_role(Trained()), critic=critic)
    return Updater(config, nowhere, models, Batching.of(config), find_algorithm(config.algorithm))


def update_both(updater: Any, state: RunState, samples: list[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of critic, if any, and actor, each token's advantage being 1."""
    ones = [np.ones(sample.response_len, np.float32) for sample in samples]
    values, estimate = {"engine_log_probs": ones, "old_values": ones}, StepAdvantages(ones, ones)
    critic = updater.update_critic(state, samples, values, estimate) if updater.models.critic else {}
    return critic, updater.update_actor(updater.config.algorithm, state, samples, values, estimate)


def update(
    config: RunConfig, state: RunState, samples: list[Sample], critic: Any = None
) -> tuple[dict[str, float], list[Any]]:
    """Metrics and the updates that they are of."""
    updater = make_updater(config, critic)
    _, metrics = update_both(updater, state, samples)
    return metrics, updater.models.actor.model.updates


def test_a_step_has_epochs_of_minibatches_and_the_means_of_their_metrics() -> None:
    optimizer = {"learning_rate": 3.0, "schedule": "linear"}
    train = {"steps": 4, "epochs": 2, "minibatches": 2, "shuffle": False}
    config = make_config({}, train=train, actor={"optimizer": optimizer})
    metrics, updates = update(config, RunState(step=1, policy_version=1), SAMPLES)
    assert [batch.sample_ids for batches, _, _ in updates for batch in batches] == [(0,), (1,), (0,), (1,)]
    assert [(denominator, rate) for _, denominator, rate in updates] == [(2, pytest.approx(2.25))] * 4
    means = {"loss": 10.0, "entropy": 2.5, "grad_norm": 7.5, "load": 2.5, "gap": 2.0}
    assert metrics == pytest.approx({**means, "learning_rate": 2.25, "skipped_updates": 0.0})


@pytest.mark.parametrize("shuffle", [True, False])
def test_minibatches_differ_between_epochs_unless_they_must_not(shuffle: bool) -> None:
    """Twelve samples in six groups, three minibatches, three epochs of two steps; a resumed run repeats the second."""
    samples = [make_sample(number // 2, 1, 0.0, None, 2 + number % 3) for number in range(12)]
    own_order = {} if shuffle else {"shuffle": False}
    config = make_config({}, seed=5, train={"steps": 4, "epochs": 3, "minibatches": 3, **own_order})
    steps = []
    for step in (0, 1, 1):
        updater = make_updater(config)
        update_both(updater, RunState(step=step, policy_version=1), samples)
        made = [
            tuple(i for batch in batches for i in batch.sample_ids)
            for batches, *_ in updater.models.actor.model.updates
        ]
        steps.append([tuple(made[start : start + 3]) for start in (0, 3, 6)])
        assert made[:3] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)], "the first epoch has the samples' own order"
        for epoch in steps[-1]:
            assert sorted(i for minibatch in epoch for i in minibatch) == list(range(12))
            assert all({i ^ 1 for i in minibatch} == {*minibatch} for minibatch in epoch), "a group stays together"
    assert steps[1] == steps[2]
    found = {epoch for step in steps[:2] for epoch in step}
    assert len(found) == (5 if shuffle else 1)


def test_every_layout_has_the_same_minibatches() -> None:
    samples = [make_sample(number // 3, 1, 0.0, None, 1 + 7 * number % 11) for number in range(24)]
    batching = Batching.of(make_config({}, seed=5, train={"steps": 4, "epochs": 4, "minibatches": 4}))
    found = []
    for dp in (1, 2, 3):
        plans = update_plans(make_role(dp=dp, tokens=16), batching, samples, step=7)
        assert all(len(plan.bins) == dp for epoch in plans for plan in epoch)
        found.append([[sorted(i for rank in plan.bins for ids in rank for i in ids) for plan in one] for one in plans])
    assert found[0] == found[1] == found[2]
    assert len({str(epoch) for epoch in found[0]}) == 4


def test_a_skipped_update_has_no_part_in_any_metric_nor_in_the_kl_coefficient() -> None:
    good = TrainStats(3.0, {"loss": 8.0, "kl": 2.0, "weight": 4.0, "max/gap": 1.0}, {"load": 1.0})
    bad = TrainStats(np.inf, dict.fromkeys(good.sums, np.nan), {"load": np.nan}, applied=False)
    means = {"loss": 4.0, "kl": 0.5, "grad_norm": 3.0, "load": 1.0, "gap": 1.0}
    assert step_metrics([(bad, 2.0), (good, 2.0)]) == {**means, "skipped_updates": 1.0}
    assert step_metrics([(bad, 2.0)]) == {"skipped_updates": 1.0}
    section = make_config({"kl": {"coefficient": 0.1, "target": 0.5}}).algorithm
    for metrics in ({"skipped_updates": 1.0}, {"kl": np.nan}, {"kl": np.inf}):
        state = RunState(kl_coefficient=0.1)
        assert adapt_coefficient(section, state, metrics, 64) == {}
        assert state.kl_coefficient == 0.1


@pytest.mark.parametrize(
    ("applied", "warmup", "own", "version"),
    [
        ((True, True), 0, None, 6),  # once in a step of several updates
        ((False, True), 0, None, 6),
        ((False, False), 0, None, 5),
        ((True, True), 2, None, 5),  # while the critic alone learns
        ((False, False), 0, "any:step", 6),  # a user's own step may train without the updater
    ],
)
def test_a_step_that_changes_weights_makes_a_policy_version(
    monkeypatch: pytest.MonkeyPatch, applied: tuple[bool, ...], warmup: int, own: str | None, version: int
) -> None:
    monkeypatch.setattr(skipped, "_report", lambda *skipped_update: None)
    train = {"steps": 9, "minibatches": 2, "max_skipped_updates": 9, "step": own}
    config = make_config({"name": "ppo"}, critic={"warmup_steps": warmup}, train=train)
    updater = make_updater(config, critic=make_role(Trained()))
    updater.models.actor.model.applied = applied

    def step(run: Run, state: RunState) -> tuple[dict[str, float], list[Sample]]:
        return update_both(run.updater, state, SAMPLES)[1], SAMPLES

    nothing = cast(Any, None)
    run = Run(config, nothing, updater.models, updater.algorithm, updater.batching, updater, nothing)
    state = RunState(step=1, policy_version=5)
    take_step(step, run, state)
    assert (state.step, state.policy_version) == (2, version)
    take_step(lambda run, state: ({}, []), run, state)  # nothing to learn from
    assert (state.step, state.policy_version) == (3, version)


def test_samples_of_older_weights_are_marked() -> None:
    config, newer = make_config({}), replace(SAMPLES[1], policy_version=2)
    for samples, marks in (([SAMPLES[0], newer], [0, 0, 0, 0, 0, 1, 1, 0]), ([newer], None)):
        _, [([batch], _, _)] = update(config, RunState(policy_version=2), samples)
        assert (batch.extra["fresh"].tolist() if "fresh" in batch.extra else None) == marks


@pytest.mark.parametrize(
    ("in_flight", "replay", "compared"), [("recompute", False, 1), ("keep", False, 0), ("recompute", True, 0)]
)
def test_tokens_are_compared_with_an_engine_that_had_the_same_weights_cache_and_experts(
    in_flight: str, replay: bool, compared: int
) -> None:
    asynchrony, actor = {"in_flight": in_flight}, {"moe": {"router_replay": replay}}
    versions = np.ones(SAMPLES[0].response_len, np.int32)
    versions[-1] = 2
    sample = replace(SAMPLES[0], token_versions=versions)
    config = make_config({}, placement="separate", asynchrony=asynchrony, actor=actor)
    _, [([batch], _, _)] = update(config, RunState(policy_version=2), [sample])
    assert batch.extra["fresh"].sum() == compared


def test_the_actor_waits_while_the_critic_alone_learns() -> None:
    config = make_config({"name": "ppo"}, critic={"warmup_steps": 2}, train={"steps": 9})
    for step, updates in ((1, 0), (2, 1)):
        state = RunState(step=step, policy_version=1)
        metrics, made = update(config, state, SAMPLES, critic=make_role(Trained()))
        assert (len(made), bool(metrics)) == (updates, updates > 0)


@pytest.mark.parametrize("lost", [None, (), ("actor_steps", "critic_steps")])
def test_the_learning_rate_counts_the_models_own_steps(lost: tuple[str, ...] | None) -> None:
    """The actor's warm-up begins with its first update, and its schedule covers the steps that are left to it. After a
    resume too, from a checkpoint with their numbers or, an older one, without."""
    optimizer = {"learning_rate": 4.0, "warmup_steps": 2, "schedule": "linear"}
    config = make_config(
        {"name": "ppo"},
        critic={"warmup_steps": 3, "optimizer": optimizer},
        actor={"optimizer": optimizer},
        train={"steps": 9, "epochs": 2},
    )
    updater, state = make_updater(config, critic=make_role(Trained())), RunState(policy_version=1)
    critics, actors = [], []
    for step in range(9):
        if step == 5 and lost is not None:
            saved = {name: value for name, value in state.to_json().items() if name not in lost}
            updater, state = make_updater(config, critic=make_role(Trained())), RunState(**saved)
        critic, actor = update_both(updater, state, SAMPLES)
        critics.append(critic["critic/learning_rate"])
        actors.append(actor.get("learning_rate"))
        state.step += 1
    assert critics == pytest.approx([2, 4, 4, 4 * 6 / 7, 4 * 5 / 7, 4 * 4 / 7, 4 * 3 / 7, 4 * 2 / 7, 4 / 7])
    assert actors == [None] * 3 + [pytest.approx(rate) for rate in (2, 4, 4, 3, 2, 1)]


def test_a_step_that_trains_twice_or_not_at_all_counts_as_one_or_none() -> None:
    config = make_config({}, actor={"optimizer": {"learning_rate": 4.0, "warmup_steps": 4}}, train={"steps": 9})
    updater, state, rates = make_updater(config), RunState(policy_version=1), []
    for times in (2, 0, 1):
        rates.append([update_both(updater, state, SAMPLES)[1]["learning_rate"] for _ in range(times)])
        state.step += 1
    assert rates == [[1, 1], [], [2]]
    assert (state.actor_steps, state.grad_norms) == (2, {})


def test_the_kl_coefficient_waits_until_the_actor_learns() -> None:
    """With a KL penalty in the reward, whose divergence is known in every step."""
    ppo = {"name": "ppo", "kl": {"coefficient": 0.05, "target": 1.0, "horizon": 10}}
    config = make_config(ppo, critic={"warmup_steps": 2}, train={"steps": 9})
    state, coefficients = RunState(policy_version=1), []
    for step in range(4):
        state.step = step
        section = current_section(config.algorithm, state)
        metrics, _ = update(config, state, SAMPLES, critic=make_role(Trained()))
        found = adapt_coefficient(section, state, {**metrics, "critic/grad_norm": 1.0, "kl": 0.0}, len(SAMPLES))
        assert bool(found) == (step >= 2)
        coefficients.append(state.kl_coefficient)
    assert coefficients == pytest.approx([0.05, 0.05, 0.05 * 0.96, 0.05 * 0.96**2])


def _run_config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "x", "model": {"path": "m"}, "train": {"steps": 1}, **sections})


def test_log_probs_are_compared_where_the_trained_distribution_is_sampled() -> None:
    from rlhpc.core.errors import UserError
    from rlhpc.trainer.step import check_logprob_diff, logprob_limit

    def limit(top_p: float) -> float | None:
        config = _run_config(rollout={"top_p": top_p}, reshard={"max_logprob_diff": 0.1})
        return logprob_limit(config, first=True, on_gpu=False)

    with pytest.raises(UserError, match=r"max_logprob_diff: in step 3 .* differ from the trainer's by 0.2"):
        check_logprob_diff(limit(1.0), 0.2, 3)
    check_logprob_diff(limit(0.5), 0.2, 3)


@pytest.mark.parametrize(
    ("dtype", "first", "on_gpu", "expected"),
    [("float32", True, False, 1e-3), ("bfloat16", True, False, 0.05), ("float32", True, True, 0.05)]
    + [(dtype, False, on_gpu, 0.5) for dtype in ("float32", "bfloat16") for on_gpu in (True, False)],
)
def test_the_first_step_after_a_start_is_held_to_rounding(
    dtype: str, first: bool, on_gpu: bool, expected: float
) -> None:
    from rlhpc.trainer.step import logprob_limit

    config = _run_config(model={"path": "m", "dtype": dtype})
    assert logprob_limit(config, first=first, on_gpu=on_gpu) == expected
    given = _run_config(model={"path": "m", "dtype": dtype}, reshard={"max_logprob_diff": None})
    assert logprob_limit(given, first=first, on_gpu=on_gpu) is None

"""Three steps of learning from given samples: the same parameters on one rank and on any axis, for actor and critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.learning import learn, make_config, make_run, make_samples
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

STEPS = 3
PPO: dict[str, Any] = {
    "algorithm": {"name": "ppo", "gae_lambda": 0.9, "gamma": 0.99, "kl": {"coefficient": 0.05}},
    "critic": {"optimizer": {"learning_rate": 1e-3}, "warmup_steps": 1},
}
GRPO: dict[str, Any] = {"algorithm": {"name": "grpo", "aggregation": "sequence-mean", "kl": {"coefficient": 0.05}}}
OTHERWISE = {"train": {"log_prob_tokens_per_microbatch": 96}}
# Samples that mostly fill a microbatch each, in minibatches of eleven: two ranks have not the same number of them.
ODD = {**PPO, "train": {"tokens_per_microbatch": 8, "prompts_per_step": 11}, "rollout": {"samples_per_prompt": 2}}
# (what is configured, actor's axes)
CASES: tuple[tuple[dict[str, Any], dict[str, int]], ...] = (
    (PPO, {}),
    ({**PPO, "critic": {**PPO["critic"], "parallel": {"pp": 2}}}, {"tp": 2}),
    ({**PPO, "critic": {**PPO["critic"], "parallel": {}}, **OTHERWISE}, {"pp": 2}),
    ({**PPO, "critic": {**PPO["critic"], "parallel": {"cp": 2}, "tokens_per_microbatch": 40}}, {"cp": 2}),
    (GRPO, {}),
    ({**GRPO, **OTHERWISE}, {"cp": 2}),
    (ODD, {}),
)


# What one rank does with bounds of its own for each kind of pass; no sample has more than 37 tokens.
BOUNDS = {"critic train": 40, "critic values": 40, "actor train": 64, "actor log_probs": 96, "reference log_probs": 96}
OF_ONE = ({**PPO, **OTHERWISE, "critic": {**PPO["critic"], "tokens_per_microbatch": 40}}, {**GRPO, **OTHERWISE}, ODD)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def of_one(model: Path) -> dict[str, Any]:
    """By one rank: what was learnt, and the most tokens of a microbatch in each kind of pass."""
    found = run_ranks(_learn_all, 1, model, [(case, {}) for case in OF_ONE])[0]
    return {_name(case): both for case, both in zip(OF_ONE, found, strict=True)}


def _name(case: dict[str, Any]) -> str:
    return "odd" if case is ODD else case["algorithm"]["name"]


def test_each_model_takes_its_own_bound_on_tokens(of_one: dict[str, Any]) -> None:
    """And fills more of it than the next smaller one has."""
    for name, kinds in (("ppo", BOUNDS), ("grpo", [kind for kind in BOUNDS if "critic" not in kind])):
        sizes = of_one[name][1]
        assert set(sizes) == set(kinds)
        for kind, most in sizes.items():
            smaller = max((bound for bound in BOUNDS.values() if bound < BOUNDS[kind]), default=0)
            assert smaller < most <= BOUNDS[kind], kind


def test_every_axis_learns_what_one_rank_learns(model: Path, of_one: dict[str, Any]) -> None:
    """Ragged lengths, tokens that were given, a sample without any that was selected, 2 epochs of 2 minibatches, and a
    rank that has a microbatch less than the other."""
    on_ranks = run_ranks(_learn_all, 2, model, CASES)[0]
    for (case, axes), (found, _) in zip(CASES, on_ranks, strict=True):
        expected = of_one[_name(case)][0]
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert np.abs(tensor - expected[name]).max() < 1e-4, (case, axes, name)
        start = {name: np.abs(tensor).max() for name, tensor in expected.items()}
        assert min(start.values()) > 0


Learnt = tuple[dict[str, np.ndarray], dict[str, int]]


def _learn_all(model: Path, cases: Sequence[tuple[dict[str, Any], dict[str, int]]]) -> list[Learnt]:
    return [_learn(model, case, axes) for case, axes in cases]


def _learn(model: Path, case: dict[str, Any], axes: dict[str, int]) -> Learnt:
    """By how much each weight has changed, and the sizes of microbatches."""
    from rlhpc.api import RunState

    config = make_config(model, case, axes)
    run, state = make_run(config), RunState()
    sizes = _watch(run)
    before = _weights(run)
    for step in range(STEPS):
        samples = make_samples(step)[: config.train.prompts_per_step * config.rollout.samples_per_prompt]
        _, metrics = learn(run, config.algorithm, state, samples)
        assert bool(metrics) == (run.critic is None or step > 0), "the critic's warm-up"
        state.step += 1
    after = _weights(run)
    return {name: after[name] - before[name] for name in after}, sizes


def _watch(run: Any) -> dict[str, int]:
    """The most tokens of a microbatch that each model is given, by what is done with it; filled while it works."""
    sizes: dict[str, int] = {}

    def watched(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(batches: Sequence[Any], *rest: Any, **named: Any) -> Any:
            sizes[kind] = max(sizes.get(kind, 0), *(len(batch.tokens) for batch in batches))
            return call(batches, *rest, **named)

        return measured

    for name in ("actor", "reference", "critic"):
        for act in ("train", "log_probs", "values"):
            if (model := getattr(run, name)) is not None:
                setattr(model, act, watched(f"{name} {act}", getattr(model, act)))
    return sizes


def _weights(run: Any) -> dict[str, np.ndarray]:
    """Of both models, by name."""
    found = {f"actor {name}": tensor.detach().clone().numpy() for name, tensor in run.actor.full_tensors()}
    if run.critic is not None:
        with run.critic._groups:
            found |= {f"critic {name}": tensor.detach().clone().numpy() for name, tensor in run.critic.full_tensors()}
    return found

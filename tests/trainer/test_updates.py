"""Three steps of learning from given samples: the same parameters on one rank and on any axis, for actor and critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.learning import make_config, make_run, make_samples
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.slow

STEPS = 3
PPO: dict[str, Any] = {
    "algorithm": {"name": "ppo", "gae_decay": 0.9, "discount": 0.99, "kl": {"coefficient": 0.05}},
    "critic": {"optimizer": {"learning_rate": 1e-3}, "warmup_steps": 1},
}
GRPO: dict[str, Any] = {"algorithm": {"name": "grpo", "aggregation": "sequence-mean", "kl": {"coefficient": 0.05}}}
OTHERWISE = {"train": {"log_prob_tokens_per_microbatch": 96}}
# (what is configured, actor's axes)
CASES: tuple[tuple[dict[str, Any], dict[str, int]], ...] = (
    (PPO, {}),
    ({**PPO, "critic": {**PPO["critic"], "parallel": {"pp": 2}}}, {"tp": 2}),
    ({**PPO, "critic": {**PPO["critic"], "parallel": {}}, **OTHERWISE}, {"pp": 2}),
    ({**PPO, "critic": {**PPO["critic"], "parallel": {"cp": 2}, "tokens_per_microbatch": 40}}, {"cp": 2}),
    (GRPO, {}),
    ({**GRPO, **OTHERWISE}, {"cp": 2}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


def test_every_axis_learns_what_one_rank_learns(model: Path) -> None:
    """Ragged lengths, tokens that were given, a sample without any that was chosen, 2 epochs of 2 minibatches."""
    of_one = {case["algorithm"]["name"]: found for case, found in zip((PPO, GRPO), _on_ranks(model, 1), strict=True)}
    for (case, axes), found in zip(CASES, _on_ranks(model, 2), strict=True):
        expected = of_one[case["algorithm"]["name"]]
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert np.abs(tensor - expected[name]).max() < 1e-4, (case, axes, name)
        start = {name: np.abs(tensor).max() for name, tensor in expected.items()}
        assert min(start.values()) > 0


def _on_ranks(model: Path, ranks: int) -> list[dict[str, np.ndarray]]:
    cases = CASES if ranks > 1 else ((PPO, {}), (GRPO, {}))
    return run_ranks(_learn_all, ranks, model, cases)[0]


def _learn_all(model: Path, cases: tuple[tuple[dict[str, Any], dict[str, int]], ...]) -> list[dict[str, np.ndarray]]:
    return [_learn(model, case, axes) for case, axes in cases]


def _learn(model: Path, case: dict[str, Any], axes: dict[str, int]) -> dict[str, np.ndarray]:
    from rlhpc.api import RunState
    from rlhpc.trainer.advantages import step_advantages, token_values
    from rlhpc.trainer.update import update_actor, update_critic

    config = make_config(model, case, axes)
    run, state = make_run(config), RunState()
    before = _weights(run)
    for step in range(STEPS):
        samples = make_samples(step)
        values = token_values(run, samples)
        estimate = step_advantages(run, config.algorithm, samples, [], values)
        if run.critic is not None:
            update_critic(run, state, samples, values, estimate)
        metrics = update_actor(run, config.algorithm, state, samples, values, estimate)
        assert bool(metrics) == (run.critic is None or step > 0), "the critic's warm-up"
        state.step += 1
    after = _weights(run)
    return {name: after[name] - before[name] for name in after}


def _weights(run: Any) -> dict[str, np.ndarray]:
    """Of both models, by name."""
    found = {f"actor {name}": tensor.detach().clone().numpy() for name, tensor in run.actor.full_tensors()}
    if run.critic is not None:
        with run.critic._groups:
            found |= {f"critic {name}": tensor.detach().clone().numpy() for name, tensor in run.critic.full_tensors()}
    return found

"""Three steps of learning from given samples: the same parameters on one rank and on any axis, for actor and critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.slow

STEPS, GROUPS, GROUP_SIZE = 3, 6, 4
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

    config = _config(model, case, axes)
    run, state = _run(config), RunState()
    before = _weights(run)
    for step in range(STEPS):
        samples = _samples(step)
        values = token_values(run, samples)
        estimate = step_advantages(run, config.algorithm, samples, [], values)
        if run.critic is not None:
            update_critic(run, state, samples, values, estimate)
        metrics = update_actor(run, config.algorithm, state, samples, values, estimate)
        assert bool(metrics) == (run.critic is None or step > 0), "the critic's warm-up"
        state.step += 1
    after = _weights(run)
    return {name: after[name] - before[name] for name in after}


def _samples(step: int) -> list[Any]:
    """With log-probs as an engine might have given them, and rewards that are not all the same."""
    from rlhpc.api import Sample

    rng = np.random.default_rng(step)
    samples = []
    for number in range(GROUPS * GROUP_SIZE):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        chosen = rng.random(response) < 0.7 if number % 5 == 1 else None
        if number == 7:
            chosen = np.zeros(response, dtype=bool)
        samples.append(
            Sample(
                prompt_id=number // GROUP_SIZE,
                group_id=number // GROUP_SIZE,
                tokens=rng.integers(2, 64, prompt + response).astype(np.int32),
                prompt_len=prompt,
                log_probs=-rng.random(response).astype(np.float32),
                reward=float(rng.random()),
                weights_version=step,
                truncated=False,
                chosen=chosen,
            )
        )
    return samples


def _config(model: Path, case: dict[str, Any], axes: dict[str, int]) -> Any:
    from rlhpc.config.schema import RunConfig

    train = {
        "steps": 10,
        "minibatches": 2,
        "epochs": 2,
        "tokens_per_microbatch": 64,
        "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-4},
        **case.get("train", {}),
    }
    fixed = {"name": "updates", "model": {"path": str(model), "dtype": "float32"}, "parallel": axes}
    return RunConfig.model_validate({**fixed, **case, "train": train})


def _run(config: Any) -> Any:
    """The trainer's side of a run."""
    from types import SimpleNamespace

    from rlhpc.algo import find_algorithm
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.trainer.build import Run
    from rlhpc.trainer.models import make_models

    info, shape = RankInfo.from_environ(), read_model(config.model.path)
    algorithm = find_algorithm(config.algorithm)
    models = make_models(config, info, shape, algorithm)
    rest = dict.fromkeys(Run.__dataclass_fields__)
    context = SimpleNamespace(info=info)
    own = {"config": config, "context": context, "shape": shape, "algorithm": algorithm, "models": models}
    return Run(**{**rest, **own})


def _weights(run: Any) -> dict[str, np.ndarray]:
    """Of both models, by name."""
    found = {f"actor {name}": tensor.detach().clone().numpy() for name, tensor in run.actor.full_tensors()}
    if run.critic is not None:
        with run.critic._groups:
            found |= {f"critic {name}": tensor.detach().clone().numpy() for name, tensor in run.critic.full_tensors()}
    return found

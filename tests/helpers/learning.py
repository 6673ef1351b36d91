"""The trainer's side of a run: models of a small config, and random samples in place of an engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.algo import find_algorithm
from rlhpc.api import Sample
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.models import read_model
from rlhpc.trainer.advantages import step_advantages, token_values
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.models import make_models
from rlhpc.trainer.run import Run
from rlhpc.trainer.update import Updater

GROUPS, GROUP_SIZE = 6, 4


def make_samples(step: int) -> list[Any]:
    """Samples with plausible log-probs and varied rewards."""
    rng = np.random.default_rng(step)
    samples = []
    for number in range(GROUPS * GROUP_SIZE):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        response_mask = rng.random(response) < 0.7 if number % 5 == 1 else None
        if number == 7:
            response_mask = np.zeros(response, dtype=bool)
        samples.append(
            Sample(
                prompt_id=number // GROUP_SIZE,
                group_id=number // GROUP_SIZE,
                tokens=rng.integers(2, 64, prompt + response).astype(np.int32),
                prompt_len=prompt,
                log_probs=-rng.random(response).astype(np.float32),
                reward=float(rng.random()),
                policy_version=step,
                truncated=False,
                response_mask=response_mask,
            )
        )
    return samples


def make_config(model: Path, case: dict[str, Any], axes: dict[str, int]) -> Any:
    """Config of two epochs of two small minibatches. ``case``: further sections; ``axes``: the actor's layout."""
    train = {
        "steps": 10,
        "minibatches": 2,
        "epochs": 2,
        "tokens_per_microbatch": 64,
        **case.get("train", {}),
    }
    optimizer = {"learning_rate": 1e-3, "epsilon": 1e-4}
    actor = {"parallel": axes, "optimizer": optimizer, **case.get("actor", {})}
    fixed = {"name": "updates", "model": {"path": str(model), "dtype": "float32"}}
    return RunConfig.model_validate({**fixed, **case, "actor": actor, "train": train})


def make_run(config: Any, attempt: Any = None) -> Any:
    """The trainer's side of a run, without an engine; ``attempt`` is the folder that skipped updates are written in."""
    info, shape = RankInfo.from_environ(), read_model(config.model.path)
    algorithm, batching = find_algorithm(config.algorithm), Batching.of(config)
    models = make_models(config, info, shape, algorithm)
    attempt = attempt or RunFolder(Path("nowhere")).attempt(1)
    context = RankContext(attempt, info, StopRequest(), Heartbeat(attempt.heartbeats, info.rank))
    updater = Updater(config, context, models, batching, algorithm)
    return Run(config, context, models, algorithm, batching, updater, Carryover())


def learn(run: Any, section: Any, state: Any, samples: list[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The second half of a step on these samples: metrics of the updates of the critic, if any, and of the actor."""
    values, estimate = estimates(run, section, samples)
    critic = run.updater.update_critic(state, samples, values, estimate) if run.critic is not None else {}
    return critic, run.updater.update_actor(section, state, samples, values, estimate)


def estimates(run: Any, section: Any, samples: list[Any]) -> tuple[Any, Any]:
    """Values and advantages of the samples' tokens."""
    values = token_values(run.models, run.batching, samples, run.config.rollout.temperature)
    return values, step_advantages(run.algorithm, section, samples, [], values)

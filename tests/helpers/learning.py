"""The trainer's side of a run: models of a small config, and samples as if an engine had drawn them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

GROUPS, GROUP_SIZE = 6, 4


def make_samples(step: int) -> list[Any]:
    """With log-probs as an engine might have given them, and rewards that are not all the same."""
    from rlhpc.api import Sample

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
    """Two epochs of two minibatches of few tokens; ``case`` holds further sections, ``axes`` are the actor's."""
    from rlhpc.config.schema import RunConfig

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


def make_run(config: Any) -> Any:
    """The trainer's side of a run."""
    from types import SimpleNamespace

    from rlhpc.algo import find_algorithm
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.trainer.build import Run
    from rlhpc.trainer.models import make_models
    from rlhpc.trainer.reward_reader import RewardReader

    info, shape = RankInfo.from_environ(), read_model(config.model.path)
    algorithm = find_algorithm(config.algorithm)
    models = make_models(config, info, shape, algorithm)
    rest = dict.fromkeys(Run.__dataclass_fields__)
    context = SimpleNamespace(info=info)
    own = {"config": config, "context": context, "shape": shape, "algorithm": algorithm, "models": models}
    return Run(**{**rest, **own, "reward_reader": RewardReader.of(config, None)})

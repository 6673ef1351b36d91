"""Updates whose gradient norm is far above those before them are skipped like ones that are not finite."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.core.files import read_json
from rlhpc.core.folder import RunFolder, SkippedUpdate
from rlhpc.trainer.spikes import FEWEST, WINDOW, largest_norm, with_norm
from tests.helpers.distributed import run_ranks
from tests.helpers.learning import estimates, make_config, make_run, make_samples
from tests.helpers.tiny_models import make_model

RATIO, SPIKE = 10.0, 1000


def test_the_limit_is_a_multiple_of_the_median() -> None:
    norms: list[float] = []
    for norm in range(1, FEWEST + 1):
        assert largest_norm(norms, 2.5) == math.inf, "too few to judge by"
        norms = with_norm(norms, float(norm))
    assert largest_norm(norms, 2.5) == 2.5 * (FEWEST + 1) / 2
    assert largest_norm(norms, None) == math.inf
    assert largest_norm(with_norm(norms, 1e9), 2.5) < 4 * FEWEST, "one spike does not hide the next"


def test_the_window_has_the_newest_norms_that_say_something() -> None:
    norms: list[float] = []
    for norm in (*range(1, 2 * WINDOW), 0.0, math.nan, math.inf):
        norms = with_norm(norms, float(norm))
    assert norms == [float(norm) for norm in range(WINDOW, 2 * WINDOW)]


@pytest.mark.ranks
def test_a_spike_is_skipped_in_every_phase_and_after_a_resume(tmp_path: Path) -> None:
    """Of the actor, the critic and the supervised warm-up, on two pipeline stages: the eighth step has advantages and
    returns a thousand times as large."""
    model = make_model(tmp_path / "model", "qwen2")
    RunFolder(tmp_path / "run").attempt(1).path.mkdir(parents=True)
    found, other = run_ranks(_learn, 2, model, tmp_path / "run")
    assert found == other, "on both ranks"
    assert found["skipped"] == {name: [0.0] * 7 + [2.0, 0.0] for name in ("actor", "critic")}
    assert found["changed"] == [step != 7 for step in range(9)]
    assert (found["sft"], found["norms"]) == ([0.0, 1.0, 0.0], {"actor": 18, "critic": 18, "sft": FEWEST + 1})
    assert found["end"].startswith(
        "rl step 11: 3 update(s) of the actor in a row were skipped, the last one because its"
    )
    assert "(train.max_grad_norm_ratio) (train.max_skipped_updates: 3); the batches are in" in found["end"]
    folder = RunFolder(tmp_path / "run").skipped_updates
    first = SkippedUpdate(folder / "rl-00000008-critic-001")
    names = {f"rl-00000008-{name}-{number:03d}" for name in ("actor", "critic") for number in (1, 2)}
    assert names | {"sft-00000002-actor-001"} < {path.name for path in folder.iterdir()}
    record = read_json(first.record)
    assert float(record["grad_norm"]) > float(record["skip_above"]) > 0


def _learn(model: Path, folder: Path) -> dict[str, Any]:
    """What nine steps of PPO skip and change, the eighth with a spike and after a resume; what three supervised updates
    skip, the second after much smaller norms; what ends a run of spikes alone."""
    import torch.distributed as dist

    from rlhpc.api import RunState
    from rlhpc.core.errors import NonFiniteError
    from rlhpc.data.files import Order
    from rlhpc.data.sft import Example, SFTSet

    optimizer = {"learning_rate": 1e-4}
    case = {
        "algorithm": {"name": "ppo", "kl": {"coefficient": 0.0}},
        "critic": {"optimizer": optimizer, "value_clip": None},
        "sft": {"data": [], "steps": 3, "sequences_per_step": 4},
        "train": {"steps": 20, "epochs": 1, "max_grad_norm_ratio": RATIO, "max_skipped_updates": 3},
    }
    axes = {"pp": dist.get_world_size()}
    run = make_run(make_config(model, case, axes), RunFolder(folder).attempt(1))
    state = RunState()
    found: dict[str, Any] = {"skipped": {"actor": [], "critic": []}, "changed": [], "sft": [], "end": ""}
    for step in range(9):
        before = _weights(run)
        critic, actor = _step(run, state, step, SPIKE if step == 7 else 1)
        found["skipped"]["actor"].append(actor["skipped_updates"])
        found["skipped"]["critic"].append(critic["critic/skipped_updates"])
        changed = {not np.array_equal(after, before[name]) for name, after in _weights(run).items()}
        found["changed"].append(any(changed))
        state.step += 1
        if step == 5:
            state = RunState(**json.loads(json.dumps(state.to_json())))
    rows = tuple(
        Example(sample.tokens, sample.prompt_len, np.ones(sample.response_len, bool)) for sample in make_samples(0)
    )
    sequences = SFTSet(rows, Order(len(rows)))

    def supervised(*norms: float) -> float:
        state.grad_norms["sft"] = [*norms]
        metrics = run.updater.supervised(run.config.sft, state, sequences)
        found["sft"].append(metrics["skipped_updates"])
        state.sft_step += 1
        return metrics.get("grad_norm", 0.0)

    usual = supervised()
    supervised(*[usual / 100] * FEWEST)
    supervised(*[usual] * FEWEST)
    found["norms"] = {name: len(norms) for name, norms in state.grad_norms.items()}
    try:
        for step in (9, 10):
            _step(run, state, step, SPIKE, critic=False)
            state.step += 1
    except NonFiniteError as error:
        found["end"] = str(error)
    return found


def _step(
    run: Any, state: Any, number: int, factor: float, critic: bool = True
) -> tuple[dict[str, float], dict[str, float]]:
    """A step on samples of its own, with advantages and returns multiplied."""
    samples = make_samples(number)
    values, estimate = estimates(run, run.config.algorithm, samples)
    estimate = replace(
        estimate,
        advantages=[tokens * factor for tokens in estimate.advantages],
        returns=[tokens * factor for tokens in estimate.returns],
    )
    metrics = run.updater.update_critic(state, samples, values, estimate) if critic else {}
    return metrics, run.updater.update_actor(run.config.algorithm, state, samples, values, estimate)


def _weights(run: Any) -> dict[str, np.ndarray]:
    return {
        f"{name} {key}": tensor.detach().clone().numpy()
        for name, model in (("actor", run.actor), ("critic", run.critic))
        for key, tensor in model.full_tensors()
    }

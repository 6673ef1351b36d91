"""Two ranks of judges beside two that train: the values, updates and checkpoints of models beside the actor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlhpc.algo import find_algorithm
from rlhpc.api import RunState
from rlhpc.config.model_settings import models_on
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.models import read_model
from rlhpc.parallel.channel import open_channel
from rlhpc.parallel.groups import job_store
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.judge_side import JudgeSide
from rlhpc.trainer.models import make_judge_models
from rlhpc.trainer.update import Updater
from tests.helpers.distributed import run_ranks
from tests.helpers.learning import estimates, make_config, make_run, make_samples
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

AXES = {"tp": 2}
PPO: dict[str, Any] = {
    "placement": "separate",
    "rollout": {"ranks": 1},
    "algorithm": {"name": "ppo", "kl": {"coefficient": 0.1}},
    "train": {"max_grad_norm_ratio": 9.0},
    "critic": {"optimizer": {"learning_rate": 1e-3, "schedule": "linear"}},
}
JUDGES: dict[str, Any] = {
    "judges": {"ranks": 2},
    "critic": {**PPO["critic"], "on": "judges"},
    "reference": {"on": "judges"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


def test_judges_compute_what_the_models_beside_the_actor_do(model: Path, tmp_path: Path) -> None:
    """Values, metrics, what changes in the state, and the critic that is saved; also of a step of the user's own that
    trains on other samples than those evaluated."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    beside = run_ranks(_beside, 2, model)
    found = run_ranks(_with_judges, 4, model, tmp_path, roles=(2, 2))
    for ours, theirs in zip(found[:2], beside, strict=True):
        assert len(ours) == len(theirs) == 3
        for (values, metrics, state), (own_values, own_metrics, own_state) in zip(ours, theirs, strict=True):
            assert values.keys() == own_values.keys() > {"reference_log_probs", "old_values"}
            for name, tokens in own_values.items():
                assert all(np.array_equal(a, b) for a, b in zip(values[name], tokens, strict=True)), name
            assert 0 <= metrics.pop("judges/idle_fraction") < 1  # known on the first rank
            assert metrics.pop("trainers/judges_seconds") > 0
            assert metrics == own_metrics
            assert state == own_state
    assert found[0][-1][2]["critic_steps"] == 3
    assert found[2:] == ["deadline", "deadline"]
    for name in ("first", "second"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {"critic", "reference"}
        assert any((tmp_path / name / "critic").iterdir())


def _steps(run: Any) -> Any:
    """Makes three steps, the last with fewer samples than were evaluated; yields values, metrics and state of each."""
    section, state = run.config.algorithm, RunState(actor_steps=0, critic_steps=0)
    for step in range(3):
        samples = make_samples(step)
        values, estimate = estimates(run, section, samples)
        if step == 2:
            samples, values = samples[:12], {name: tokens[:12] for name, tokens in values.items()}
            estimate = dataclasses.replace(estimate, advantages=estimate.advantages[:12], returns=estimate.returns[:12])
        metrics = run.updater.update_critic(state, samples, values, estimate)
        metrics |= run.updater.update_actor(section, state, samples, values, estimate)
        if run.models.judges is not None:
            metrics |= run.models.judges.end_step(state)
        state.step += 1
        yield values, metrics, dataclasses.asdict(state)


def _beside(model: Path) -> Any:
    return [*_steps(make_run(make_config(model, PPO, AXES)))]


def _with_judges(model: Path, folder: Path) -> Any:
    info = RankInfo.from_environ()
    channel = open_channel(job_store(), "judges", (0, 2), info.job_rank) if info.rank == 0 else None
    config = make_config(model, {**PPO, **JUDGES}, AXES)
    reason = _train(config, channel, folder) if info.first == 0 else _judge(config, channel)
    if channel is not None:
        channel.close()
    return reason


def _train(config: Any, channel: Any, folder: Path) -> Any:
    run = make_run(config)
    side = run.models.judges = JudgeSide(models_on(config, "judges"), channel)
    assert (run.reference, run.critic, run.models.has_critic) == (None, None, True)
    side.begin(RunState(), None, reference=False)
    steps = [*_steps(run)]
    first = side.save(folder / "first", RunState(step=1), asynchronous=False, reference=True)
    second = side.save(folder / "second", RunState(step=2), asynchronous=True, reference=True)
    for share in (second, first):
        share.finish()
    if dist.get_rank() == 0:
        (folder / "file").touch()
    dist.barrier()
    refused = side.save(folder / "file", RunState(step=3), asynchronous=False, reference=False)
    if dist.get_rank() == 0:
        with pytest.raises(OSError, match="file"):
            refused.finish()
    side.end("deadline")
    return steps


def _judge(config: Any, channel: Any) -> Any:
    from rlhpc.trainer.judge_loop import JudgeLoop, JudgeParts

    info, attempt = RankInfo.from_environ(), RunFolder(Path("nowhere")).attempt(1)
    models = make_judge_models(config, info, read_model(config.model.path))
    context = RankContext(attempt, info, StopRequest(), Heartbeat(attempt.heartbeats, info.rank))
    batching = Batching.of(config)
    updater = Updater(config, context, models, batching, find_algorithm(config.algorithm))
    return JudgeLoop(JudgeParts(config, context, models, batching, updater), channel).run()

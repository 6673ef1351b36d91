"""Reference model, critic and reward model on ranks of their own: bit-equal to the same models on the ranks that train,
also after a rank of judges was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.data import arithmetic
from tests.helpers.runs import complete, records, write_config
from tests.trainer.test_evaluate import save_classifier
from tests.trainer.test_separate import COSTS, last_checkpoint, run_with_kills, steps_of

# tests/trainer/test_judge_loop.py has the same without engines.
pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]

PPO: dict[str, Any] = {"name": "ppo", "kl": {"coefficient": 0.01}}


def _config(folder: Path, *, judges: bool, **changes: Any) -> Path:
    """PPO with a reference model, on judges or on the rank that trains."""
    where: dict[str, Any] = {}
    if judges:
        where = {"judges__ranks": 1, "reference__on": "judges", "critic__on": "judges"}
    settings: dict[str, Any] = {
        "sft__steps": 1,
        "resources__ranks_per_node": 3 if judges else 2,
        "placement": "separate",
        "rollout__ranks": 1,
        "asynchrony": {"max_staleness": 1, "costs": COSTS},
        "algorithm": PPO,
        "train__steps": 3,
        "train__prompts_per_step": 8,
        "train__minibatches": 2,
        "rewards__0__function": "tests.trainer.test_first_rl_step:short_answers",
        "rollout__max_response_tokens": 12,
    }
    return write_config(folder, **{**settings, **where, **changes})


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_ppo_with_judges_equals_ppo_without(tmp_path: Path, backend: str) -> None:
    """Critic and reference, which begin RL with the warmed-up weights: metrics and weights."""
    for name, judges in (("judges", True), ("trainers", False)):
        complete(_config(tmp_path / name, judges=judges, train__backend=backend))
    ours, theirs = (steps_of(tmp_path / name) for name in ("judges", "trainers"))
    assert ours == theirs
    assert {"kl", "critic/loss", "critic/learning_rate"} <= ours[-1].keys()
    for record in records(tmp_path / "judges" / "run"):
        if record["phase"] == "rl" and record["step"]:
            assert 0 < record["judges/idle_fraction"] < 1
            assert 0 < record["trainers/judges_seconds"] < record["perf/step_seconds"]
    for model in ("actor", "critic"):
        ours, theirs = (last_checkpoint(tmp_path / name, model) for name in ("judges", "trainers"))
        assert ours == theirs


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_reward_model_on_judges_gives_the_same_scores(tmp_path: Path, backend: str) -> None:
    """In training, and of the answers to held-out prompts; with a tokenizer of its own."""
    scores = []
    for name, judges in (("judges", True), ("trainers", False)):
        folder = tmp_path / name
        arithmetic.make(str(folder / "inputs"))
        save_classifier(folder / "inputs" / "model", folder / "reward_model")
        section = {"model": str(folder / "reward_model"), "own_tokenizer": True, "on": name}
        changes: dict[str, Any] = {"judges__ranks": 1} if judges else {}
        config = _config(
            folder,
            judges=False,
            rewards__1=section,
            algorithm={"name": "grpo"},
            train__backend=backend,
            resources__ranks_per_node=2 + judges,
            validation={"every": 2, "max_prompts": 8},
            **changes,
        )
        complete(config)
        scores.append(steps_of(folder))
    assert scores[0] == scores[1]
    assert all(step["reward/model"] for step in scores[0])
    assert any("validation/reward_mean" in step for step in scores[0])


def test_a_killed_judge_is_resumed_bit_equal(tmp_path: Path) -> None:
    """Two ranks of judges with layouts of their own, whose critic and reference are in the checkpoints; then one of the
    ranks that train is killed too."""
    changes: dict[str, Any] = {
        "judges__ranks": 2,
        "resources__ranks_per_node": 4,
        "reference__parallel": {"tp": 2},
        "critic__optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
        "train__steps": 4,
        "checkpoint": {"every": 1, "keep": 1},
    }
    straight = _config(tmp_path / "straight", judges=True, **changes)
    complete(straight)
    run_with_kills(_config(tmp_path / "killed", judges=True, **changes), ((2, 2), (0, 3)))
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "straight")
    for model in ("actor", "critic", "reference"):
        ours, theirs = (last_checkpoint(tmp_path / name, model) for name in ("killed", "straight"))
        assert ours == theirs

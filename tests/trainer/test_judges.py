"""Reference model, critic and reward model on ranks of their own: bit-equal to the same models on the ranks that train,
also after a rank of judges was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import run, write_config
from tests.trainer.test_separate import COSTS, last_checkpoint, steps_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

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


def test_ppo_with_judges_equals_ppo_without(tmp_path: Path) -> None:
    """Critic and reference, which begin RL with the warmed-up weights: metrics and weights."""
    for name, judges in (("judges", True), ("trainers", False)):
        code, output = run(_config(tmp_path / name, judges=judges))
        assert code == 0, output
    ours, theirs = (steps_of(tmp_path / name) for name in ("judges", "trainers"))
    assert ours == theirs
    assert {"kl", "critic/loss", "critic/learning_rate"} <= ours[-1].keys()
    for model in ("actor", "critic"):
        ours, theirs = (last_checkpoint(tmp_path / name, model) for name in ("judges", "trainers"))
        assert ours == theirs

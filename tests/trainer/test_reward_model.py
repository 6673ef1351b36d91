"""A HuggingFace sequence classifier as reward, cut over ranks: its scores are those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhpc.core.errors import UserError
from rlhpc.plan.rewards import check_reward_model
from tests.helpers.distributed import run_ranks
from tests.helpers.learning import make_config, make_run, make_samples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and a reward model, each as transformers saves it."""
    import torch
    import transformers

    from tests.helpers.tiny_models import make_model

    policy = make_model(tmp_path_factory.mktemp("policy"), "qwen2")
    config = transformers.AutoConfig.from_pretrained(policy)
    config.num_labels = 1
    torch.manual_seed(5)
    model = transformers.Qwen2ForSequenceClassification(config).float()
    model.score.weight.data.normal_()
    folder = tmp_path_factory.mktemp("reward")
    model.save_pretrained(folder)
    return policy, folder


def test_scores_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    """Weighted, added to what functions gave, under a layout that is not the actor's; equal on every rank."""
    expected = _by_transformers(folders[1])
    assert expected.std() > 0.1
    for rewards, parts in run_ranks(_scores, 2, *folders):
        given = np.array([sample.reward for sample in make_samples(0)])
        assert np.abs(parts - expected).max() < 1e-4
        assert np.abs(rewards - (given + 0.5 * expected)).max() < 1e-4


def test_a_model_without_a_head_is_refused(folders: tuple[Path, Path]) -> None:
    policy, _ = folders
    config = make_config(policy, {"reward": {"model": {"path": str(policy)}}}, {})
    with pytest.raises(UserError, match=r"no tensor .score\.weight"):
        check_reward_model(config, world_size=1)


def test_other_words_and_a_misfitting_layout_are_refused(folders: tuple[Path, Path]) -> None:
    policy, reward = folders
    (policy / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (reward / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
    case = {"reward": {"model": {"path": str(reward), "parallel": {"tp": 3}}}}
    with pytest.raises(UserError, match=r"vocabularies of .* differ"):
        check_reward_model(make_config(policy, case, {}), world_size=3)
    (reward / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "version": "1.0"}')
    with pytest.raises(UserError, match="the reward model: ") as caught:
        check_reward_model(make_config(policy, case, {}), world_size=3)
    assert str(caught.value.where).startswith("reward.model.parallel")


def _scores(policy: Path, reward: Path) -> tuple[np.ndarray, np.ndarray]:
    from rlhpc.trainer.reward_model import score_by_model

    section = {"path": str(reward), "weight": 0.5, "parallel": {"pp": 2}, "tokens_per_microbatch": 80}
    run = make_run(make_config(policy, {"reward": {"model": section}}, {"tp": 2}))
    scored = score_by_model(run, make_samples(0))
    return np.array([s.reward for s in scored]), np.array([s.reward_parts["model"] for s in scored])


def _by_transformers(folder: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        inputs = [torch.from_numpy(sample.tokens.astype(np.int64))[None] for sample in make_samples(0)]
        return np.array([float(model(tokens).logits[0, 0]) for tokens in inputs])

"""docs/recovery.md lists the keys that may change; the run folder's own config.yaml continues the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import complete, records, run, write_config

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.vllm,
    pytest.mark.long,
]  # always: tests/backends/test_parallel.py, tests/trainer/test_resume.py


def test_a_finished_run_continues_in_another_layout_for_more_steps(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        resources__ranks_per_node=2,
        sft__steps=2,
        train__steps=2,
        algorithm__kl__coefficient=0.05,
        rewards__0__function="tests.trainer.test_first_rl_step:short_answers",  # which moves the policy in each step
        actor__optimizer__learning_rate=1e-4,
        data__validation=[],
    )
    complete(config)
    changes = ("actor.parallel.tp=2", "rollout.tp=2", "train.steps=3", "actor.optimizer.learning_rate=2e-5")
    complete(tmp_path / "run" / "config.yaml", "--resume", *changes)
    *_, before, after = records(tmp_path / "run")
    assert (before["step"], after["step"]) == (2, 3)
    assert (before["learning_rate"], after["learning_rate"]) == (1e-4, 2e-5)
    # The policy is one small update farther from the warmed-up model: neither of them is lost.
    assert before["kl"] > 0.005
    assert before["kl"] < after["kl"] < 6 * before["kl"] < 0.2
    assert after["logprob_diff_max"] < 1e-4

    code, output = run(tmp_path / "run" / "config.yaml", "--resume", "sft.steps=5", "train.steps=4")
    assert code == 2, output
    assert "sft.steps: 5 supervised steps, but RL has begun after 2 of them; set it back to 2" in output

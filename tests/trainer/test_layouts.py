"""The same run on one rank and cut over several: the first step equal, and every layout learns."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import complete, records, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]

# name: (ranks, axes of the training side, rollout tp)
LAYOUTS: dict[str, tuple[int, dict[str, int], int]] = {
    "one": (1, {}, 1),
    "dp2": (2, {}, 1),
    "dp2_tp2": (4, {"tp": 2}, 1),
    "pp2_cp2": (4, {"pp": 2, "cp": 2}, 2),
}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Metrics of the same run in each layout."""
    found = {}
    for name, (ranks, axes, rollout_tp) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        config = write_config(
            folder,
            resources__ranks_per_node=ranks,
            actor__parallel=axes,
            rollout__tp=rollout_tp,
            sft__steps=2,
            train__steps=8,
            train__prompts_per_step=32,
            actor__optimizer__learning_rate=1e-3,
            # Learnt in a few steps by a model that knows nothing.
            rewards__0__function="tests.trainer.test_layouts:sevens",
            data__validation=[],
        )
        complete(config)
        found[name] = records(folder / "run")
    return found


def sevens(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Share of the longest response that is the digit seven."""
    return solution_str.count("7") / 6


def _step(metrics: list[dict[str, Any]], phase: str, step: int) -> dict[str, Any]:
    return next(record for record in metrics if (record["phase"], record["step"]) == (phase, step))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_first_steps_equal_one_rank(curves: dict[str, list[dict[str, Any]]], name: str) -> None:
    ours, one = _step(curves[name], "sft", 1), _step(curves["one"], "sft", 1)
    assert ours["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trainer_and_engine_agree_on_log_probs_in_every_step(
    curves: dict[str, list[dict[str, Any]]], name: str
) -> None:
    gaps = [record["logprob_diff_max"] for record in curves[name] if "logprob_diff_max" in record]
    assert len(gaps) == 8
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_learns(curves: dict[str, list[dict[str, Any]]], name: str) -> None:
    rewards = [record["reward/mean"] for record in curves[name] if "reward/mean" in record]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5, rewards

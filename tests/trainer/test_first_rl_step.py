"""The first RL step from the same weights, on every axis: the same samples, loss and gradient norm."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import complete, records, write_config
from tests.trainer.test_layouts import LAYOUTS

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


def _first_step(folder: Path, ranks: int, axes: dict[str, int], rollout_tp: int) -> dict[str, Any]:
    config = write_config(
        folder,
        resources__ranks_per_node=ranks,
        actor__parallel=axes,
        rollout__tp=rollout_tp,
        sft=None,
        train__steps=1,
        checkpoint__every=1,
        train__prompts_per_step=16,
        train__minibatches=2,  # the second update sees ratios and the clip
        rollout__samples_per_prompt=8,
        algorithm__kl__coefficient=0.1,
        data__validation=[],
        # A random model answers nothing right: reward what it often does.
        rewards__0__function="tests.trainer.test_first_rl_step:short_answers",
    )
    complete(config)
    return records(folder / "run")[-1]


def short_answers(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float]:
    """A reward that varies within every group; and how many queues have names while engines work."""
    return {"score": 1.0 / (1 + len(solution_str)) + 0.1 * solution_str.count("7"), "queues": _queues()}


def _queues() -> int:
    """In shared memory, vLLM's."""
    return len(list(Path("/dev/shm").glob("psm_*")))


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_loss_and_gradient_norm_equal_one_rank(tmp_path: Path, own_tmp: Path) -> None:
    """And ranks leave nothing behind on their node: no folder, no shared memory that a kill would leave."""
    queues = _queues()
    one = _first_step(tmp_path / "one", *LAYOUTS["one"])
    assert one["grad_norm"] > 0.01
    assert one["kl"] > 0
    for name in ("pp2_cp2",):  # test_updates.py has the other axes
        ours = _first_step(tmp_path / name, *LAYOUTS[name])
        assert ours["rollout/completion_tokens"] == one["rollout/completion_tokens"], name
        assert ours["reward/mean"] == pytest.approx(one["reward/mean"], rel=1e-6), name
        assert ours["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-6), name
        assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4), name
        assert ours["reward/queues"] == queues == _queues(), name
    left = [path.name for path in own_tmp.iterdir() if not path.name.startswith("torchinductor_")]  # that is a cache
    assert left == []


def test_the_reference_is_the_warmed_up_policy(tmp_path: Path) -> None:
    """Before its first update the policy is the reference: their KL divergence is zero."""
    config = write_config(
        tmp_path, train__steps=1, algorithm__kl__coefficient=0.1, data__validation=[], train__prompts_per_step=4
    )
    complete(config)
    assert [record["phase"] for record in records(tmp_path / "run")] == ["sft"] * 3 + ["rl"]
    assert records(tmp_path / "run")[-1]["kl"] == pytest.approx(0.0, abs=1e-7)

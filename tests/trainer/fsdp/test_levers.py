"""Whole runs with the levers of memory and parallelism: trainer and engine agree on log-probs, and levers of memory do
not change a number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.records import repeatable
from tests.helpers.runs import complete, records
from tests.trainer.fsdp.inputs import config, rl_steps

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]

_OFFLOAD = {"parameters": True, "gradients": True, "optimizer": True}
# name: (kind, ranks, further keys)
RUNS: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "ulysses": (None, 2, {"actor__parallel": {"cp": 2, "cp_method": "ulysses"}}),
    "all_gather": (None, 2, {"actor__parallel": {"cp": 2, "cp_method": "all_gather"}}),
    "cp of another family": ("olmo2", 2, {"actor__parallel": {"cp": 2}, "rollout__tp": 2}),
    "hsdp": (None, 4, {"actor__parallel": {"dp_replicate": 2}, "rollout__tp": 2}),
    "hsdp with cp": ("qwen3moe", 4, {"actor__parallel": {"dp_replicate": 2, "cp": 2}}),
}
# Levers that do not change a bit.
EXACT: dict[str, dict[str, Any]] = {
    "offload and full": {
        "actor__memory": {"offload": _OFFLOAD, "recompute": "full", "offload_activations": True},
        "reference__memory__offload": True,
    },
    "part of the offload and selective": {
        "actor__memory": {
            "offload": {**_OFFLOAD, "fraction": 0.4},
            "recompute": "selective",
            "reshard_after_forward": False,
        },
    },
}


def _finish(folder: Path, kind: str | None, ranks: int, **changes: Any) -> list[dict[str, Any]]:
    """Records of the run."""
    known: dict[str, Any] = {"algorithm__kl__coefficient": 0.05, "train__tokens_per_microbatch": 128}
    complete(config(folder, kind, ranks, **{**known, **changes}))
    return records(folder / "run")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _finish(tmp_path_factory.mktemp("plain"), None, 2)


@pytest.mark.parametrize("name", RUNS)
def test_trainer_and_engine_agree_on_log_probs(tmp_path: Path, name: str, plain: list[dict[str, Any]]) -> None:
    kind, ranks, changes = RUNS[name]
    found = _finish(tmp_path, kind, ranks, **changes)
    for step in rl_steps(tmp_path):
        assert step["logprob_diff_max"] < 1e-4
        assert step["grad_norm"] > 0.01
    if kind is None:  # the first updates, from the same weights
        for ours, theirs in zip(found[:2], plain[:2], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_levers_of_memory_do_not_change_a_bit(tmp_path: Path, name: str, plain: list[dict[str, Any]]) -> None:
    found = _finish(tmp_path, None, 2, **EXACT[name])
    assert [repeatable(record) for record in found] == [repeatable(record) for record in plain]


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_bfloat16(tmp_path: Path, kind: str) -> None:
    """Master weights are in float32; trainer and engine differ by rounding."""
    _finish(tmp_path, kind, 2, model__dtype="bfloat16", checkpoint__every=1, checkpoint__asynchronous=True)
    for step in rl_steps(tmp_path):
        assert 0 < step["logprob_diff_mean"] < 0.02
        assert step["logprob_diff_max"] < 0.2
        assert math.isfinite(step["loss"])

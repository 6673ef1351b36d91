"""Whole runs with levers of memory and parallelism, and on ranks of their own: trainer and engine agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.records import repeatable
from tests.helpers.runs import complete, records
from tests.trainer.fsdp.inputs import config, prepare, rl_steps
from tests.trainer.test_beside_engines import beside
from tests.trainer.test_lend import lending, lent
from tests.trainer.test_separate import colocated, last_checkpoint, run_with_kills, separate, steps_of

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


STEPS = 3
PPO: dict[str, Any] = {"name": "ppo", "kl": {"coefficient": 0.01}}


def _keys(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    known = {"train__backend": "fsdp", "prepare": prepare(folder, kind), "steps": STEPS}
    # Products of few rows, as of experts, are rounded otherwise by more threads.
    return {**known, "resources__threads_per_rank": 1, **changes}


@pytest.mark.parametrize("kind", ["olmo2", "gpt_oss"])
def test_staleness_0_equals_a_colocated_run(tmp_path: Path, kind: str) -> None:
    """Also after the trainer and the engine were killed."""
    ours, theirs = tmp_path / "separate", tmp_path / "colocated"
    complete(colocated(theirs, **_keys(theirs, kind)))
    run_with_kills(separate(ours, 0, **_keys(ours, kind, checkpoint__every=1)), ((0, 1), (1, 2)))
    for mine, other in zip(steps_of(ours), steps_of(theirs), strict=True):
        names = [name for name in other if not name.startswith("validation/")]
        assert {name: mine.get(name) for name in names} == {name: other[name] for name in names}
    assert last_checkpoint(ours) == last_checkpoint(theirs)


def test_trainers_ranks_generate_while_they_would_wait(tmp_path: Path) -> None:
    complete(lending(tmp_path, **_keys(tmp_path, "olmo2")))
    requests, ended, tokens = map(sum, zip(*lent(tmp_path), strict=True))
    assert 0 < ended < requests < tokens
    steps = rl_steps(tmp_path)
    assert all(step["sampling/staleness_max"] <= 1 for step in steps)
    differences = [step["logprob_diff_mean"] for step in steps if "logprob_diff_mean" in step]
    assert differences  # a step that keeps no group has none
    assert all(math.isclose(difference, 0.0, abs_tol=1e-5) for difference in differences)


def test_ppo_with_judges_equals_ppo_without(tmp_path: Path) -> None:
    judges = {"judges__ranks": 1, "reference__on": "judges", "critic__on": "judges", "resources__ranks_per_node": 3}
    for name, where in (("judges", judges), ("trainers", {})):
        folder = tmp_path / name
        complete(separate(folder, 1, **_keys(folder, "olmo2", algorithm=PPO, **where)))
    assert steps_of(tmp_path / "judges") == steps_of(tmp_path / "trainers")
    for model in ("actor", "critic"):
        ours, theirs = (last_checkpoint(tmp_path / name, model) for name in ("judges", "trainers"))
        assert ours == theirs


def test_engines_score_with_models_beside_them(tmp_path: Path) -> None:
    """A reference model of the run's architecture, and a reward model of another one."""
    file = beside(
        tmp_path,
        "engines",
        train__backend="fsdp",
        prepare=prepare(tmp_path, "olmo2"),
        actor__optimizer__learning_rate=1e-3,
    )
    complete(file)
    steps = steps_of(tmp_path)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6), "the first step's policy is the reference"
    assert steps[-1]["kl"] != pytest.approx(0.0, abs=1e-4)
    assert all(step["reward/model"] != 0 for step in steps)

"""Reference and reward model beside engines: the same scores and nearly the same numbers as on the trainers' ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhpc.data import arithmetic
from tests.helpers.runs import complete, records, write_config
from tests.trainer.test_evaluate import save_classifier
from tests.trainer.test_separate import COSTS, last_checkpoint, run_with_kills, steps_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

STEPS, TOLERANCE = 3, 2e-4  # relative: samples are packed in other batches, in float32
TEMPERATURE = 0.7  # of log-probs too: those without it differ


def beside(folder: Path, on: str, *, engines: int = 1, tp: int = 1, **changes: Any) -> Path:
    """A run with a KL term and a reward model, both on ``on``."""
    arithmetic.make(str(folder / "demo"))
    model = folder / "reward"
    model.mkdir()
    save_classifier(folder / "demo" / "model", model)
    config: dict[str, Any] = {
        "sft": None,
        "train__steps": STEPS,
        "train__prompts_per_step": 4,
        "algorithm__kl": {"coefficient": 0.05},
        "reference__on": on,
        "rewards__0__function": "tests.trainer.test_first_rl_step:short_answers",
        "rewards__0__name": "short",
        "rewards__1": {"model": str(model), "weight": 0.5, "on": on, "own_tokenizer": True},
        "rollout__max_response_tokens": 8,
        "rollout__max_num_seqs": 6,
        "rollout__temperature": TEMPERATURE,
        "rollout__ranks": engines * tp,
        "rollout__tp": tp,
        "validation__every": 2,
        "validation__max_prompts": 6,
        "resources__ranks_per_node": 1 + engines * tp,
        "placement": "separate",
        "asynchrony": {"max_staleness": 1, "costs": COSTS},
    }
    return write_config(folder, **{**config, **changes})


def _close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """All repeatable metrics agree but for the rounding of other batches."""
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float):
                assert math.isclose(mine[name], value, rel_tol=TOLERANCE, abs_tol=1e-5), (name, mine[name], value)
            else:
                assert mine[name] == value, name


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Answers to held-out prompts."""
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_engines_score_as_trainers_do(tmp_path: Path, backend: str) -> None:
    """Rewards, KL divergence and losses of every step, and rewards of held-out prompts."""
    for on in ("trainers", "engines"):
        complete(beside(tmp_path / on, on, train__backend=backend))
    ours, theirs = (steps_of(tmp_path / on) for on in ("engines", "trainers"))
    _close(ours, theirs)
    assert all(step["reward/model"] != 0 for step in ours)
    assert ours[-1]["kl"] > 0
    scored, expected = (_samples(tmp_path / on) for on in ("engines", "trainers"))
    assert [s["response"] for s in scored] == [s["response"] for s in expected]
    for mine, other in zip(scored, expected, strict=True):
        assert mine["parts"] == pytest.approx(other["parts"], rel=TOLERANCE, abs=1e-5)
        assert mine["reward"] == pytest.approx(other["reward"], rel=TOLERANCE, abs=1e-5)
    records_of = [r for r in records(tmp_path / "engines" / "run") if r["phase"] == "rl" and r["step"]]
    assert all(record["engines/idle_models_fraction"] > 0 for record in records_of)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_engines_of_two_ranks_score_as_one(tmp_path: Path, backend: str) -> None:
    for name, tp in (("one", 1), ("two", 2)):
        complete(beside(tmp_path / name, "engines", tp=tp, train__backend=backend))
    _close(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"))


@pytest.mark.long
def test_a_killed_engine_scores_the_same_again(tmp_path: Path) -> None:
    """Groups that were finished at the checkpoint are delivered and scored again."""
    saves = {"checkpoint__every": 1, "checkpoint__keep": 1}
    complete(beside(tmp_path / "straight", "engines", **saves))
    run_with_kills(beside(tmp_path / "killed", "engines", **saves), ((1, 1),))
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "straight")
    assert last_checkpoint(tmp_path / "killed") == last_checkpoint(tmp_path / "straight")


@pytest.mark.long
def test_two_engines_score_what_a_filter_keeps_of_a_model_with_experts(tmp_path: Path) -> None:
    """Groups keep their routed experts; dropped ones are not scored, and engines do not wait for one another."""
    config = beside(
        tmp_path,
        "engines",
        engines=2,
        prepare__function="tests.trainer.test_experts:make",
        prepare__arguments__kind="mixtral",
        actor__moe__router_replay=True,
        train__dynamic_sampling={"filter": "tests.trainer.test_separate:keeps"},
    )
    complete(config)
    steps = steps_of(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert any(step["sampling/dropped_groups"] > 0 for step in steps)
    for step in steps:
        assert step["reward/model"] != 0
        assert math.isfinite(step["kl"])
        assert step["logprob_diff_mean"] == pytest.approx(0.0, abs=1e-4)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6), "the first step's policy is the reference"

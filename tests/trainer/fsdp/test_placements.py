"""Architectures without a table on ranks of their own: engines, lenders and judges. Known families on the FSDP2 back
end: tests/trainer/test_separate.py, test_lend.py, test_judges.py and test_beside_engines.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import complete
from tests.trainer.fsdp.inputs import prepare, rl_steps
from tests.trainer.test_beside_engines import beside
from tests.trainer.test_lend import lending, lent
from tests.trainer.test_separate import colocated, last_checkpoint, run_with_kills, separate, steps_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]

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

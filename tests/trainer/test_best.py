"""The best validated step, by checkpoint.keep_best."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.api import RunState
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.config.schema import CheckpointSection
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.trainer.best import best_value, forget_lost_best, note_validation


def _best_steps(section: CheckpointSection, values: list[float]) -> tuple[list[int], RunState]:
    state, found = RunState(sft_step=10), []
    for value in values:
        state.step += 1
        if note_validation(section, state, {"validation/reward_mean": value}):
            found.append(state.total_steps)
    return found, state


def test_a_validation_is_the_best_one_if_it_exceeds_all_before_it() -> None:
    found, state = _best_steps(CheckpointSection(keep_best="reward_mean"), [0.2, 0.2, 0.5, 0.1, float("nan"), 0.7])
    assert found == [11, 13, 16]
    assert (state.best_of, state.best_step, state.best_value) == ("max validation/reward_mean", 16, 0.7)
    section = CheckpointSection(keep_best="validation/reward_mean", greater_is_better=False)
    assert _best_steps(section, [-0.2, -0.3, 0.5, -0.3])[0] == [11, 12]
    assert _best_steps(section, [float("nan"), 0.5])[0] == [12]
    assert _best_steps(CheckpointSection(), [1.0])[0] == [], "not asked for"


def test_a_step_without_validation_is_not_compared() -> None:
    assert not note_validation(CheckpointSection(keep_best="reward_mean"), RunState(step=1), {})


def test_a_metric_that_validation_lacks_is_an_error() -> None:
    with pytest.raises(UserError, match=r"checkpoint\.keep_best: .*'maj@4'; choose one of pass@1, reward_mean"):
        best_value(CheckpointSection(keep_best="maj@4"), {"validation/reward_mean": 1.0, "validation/pass@1": 1.0})


@pytest.mark.parametrize(
    ("section", "known"),
    [
        (CheckpointSection(keep_best="reward_mean"), True),
        (CheckpointSection(keep_best="pass@1"), False),
        (CheckpointSection(keep_best="reward_mean", greater_is_better=False), False),
        (CheckpointSection(), False),
    ],
)
def test_a_resumed_run_forgets_the_best_of_another_metric_or_without_files(
    tmp_path: Path, section: CheckpointSection, known: bool
) -> None:
    folder = tmp_path / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("12345")
    (folder / "state.json").write_text('{"state": {}, "files": {"weights": 5}}')
    store = CheckpointStore(RunFolder(tmp_path).attempt(1), keep=1)
    state = RunState(step=9, best_of="max validation/reward_mean", best_step=3, best_value=0.5)
    forget_lost_best(section, state, store)
    assert (state.best_step == 3) == known
    (folder / "weights").write_text("123")
    forget_lost_best(section, state, store)
    assert (state.best_of, state.best_step) == ("", -1)

"""``rlhpc study plot`` draws Optuna's pictures of a study's trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from tests.helpers.commands import invoke
from tests.launch.studies.trial_stand_in import advance, begin, finish


@pytest.mark.heavy
def test_the_pictures_of_eight_trials_are_optuna_s(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path, budget={"trials": 8, "at_once": 8})
    finish(folder, trials)
    said = invoke("study", "plot", str(folder.path), catch_exceptions=False).output.splitlines()
    names = ["optimization_history", "intermediate_values", "slice", "parallel_coordinate", "param_importances"]
    files = [folder.path / "plots" / f"{name}.png" for name in names]
    assert said == [f"written: {file}" for file in files]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert len({file.read_bytes() for file in files}) == len(files)


def test_pictures_need_two_results(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path)
    advance(folder, trials)
    with pytest.raises(UserError, match=r"0 complete trial\(s\), but pictures need 2; see `rlhpc study status`"):
        invoke("study", "plot", str(folder.path), catch_exceptions=False)

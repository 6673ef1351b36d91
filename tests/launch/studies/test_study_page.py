"""The page of a study holds every trial, what matters by importance, and plots; it makes no request."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import optuna
import pytest

from rlhpc.core.errors import UserError
from rlhpc.launch.studies.study_folder import read_study
from rlhpc.launch.studies.study_page import compared_trials, importance
from tests.helpers.commands import invoke
from tests.launch.studies.trial_stand_in import RATE, advance, begin, finish

COEFFICIENT = "algorithm.kl.coefficient"


def test_the_page_shows_every_trial_and_makes_no_request(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path, budget={"trials": 5, "at_once": 5})
    trials.outcome = lambda config: "<user>" if config.name.endswith("-3") else config.actor.optimizer.learning_rate
    finish(folder, trials)
    said = invoke("study", "plot", str(folder.path), catch_exceptions=False).output
    file = folder.path / "study.html"
    assert said == f"written: {file}\n"
    page = file.read_text()
    assert "<h1>search</h1>" in page
    assert re.findall(r"<tr><td>(\d+)(?: \*)?</td><td>(\w+)", page) == [
        *[(str(number), "failed" if number == 3 else "complete") for number in range(5)]
    ]
    assert "<td>&lt;user&gt;</td>" in page
    assert "http" not in page.replace("http-equiv", "")
    images = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert [ElementTree.fromstring(base64.b64decode(image)).tag.rpartition("}")[2] for image in images] == ["svg"] * 3


def test_importance_is_of_the_key_that_decides() -> None:
    study = optuna.create_study(direction="maximize")
    distributions = {key: optuna.distributions.FloatDistribution(0.0, 1.0) for key in (RATE, COEFFICIENT)}
    for number in range(40):
        params = {RATE: number * 0.37 % 1.0, COEFFICIENT: number / 40}
        value = -abs(params[COEFFICIENT] - 0.3)
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    shares = importance(study)
    assert [*shares] == [COEFFICIENT, RATE]
    assert shares[COEFFICIENT] > 0.8
    few, equal = optuna.create_study(), optuna.create_study()
    few.add_trials(study.trials[:5])
    assert importance(few) == {}
    for trial in study.trials:
        equal.add_trial(optuna.trial.create_trial(params=trial.params, distributions=distributions, value=1.0))
    assert importance(equal) == {}


def test_trials_of_a_study_in_segments_are_compared_where_all_have_a_result(tmp_path: Path) -> None:
    known = {"sampler": {"name": "RandomSampler"}, "budget": {"trials": 3, "at_once": 3}}
    folder, trials = begin(tmp_path, segments={"steps": [1, 2]}, **known)
    trials.curve = lambda config, step: float(step)
    finish(folder, trials)
    assert [trial.value for trial in compared_trials(folder, read_study(folder)).trials] == [1.0] * 3


def test_a_page_needs_two_results(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path)
    advance(folder, trials)
    with pytest.raises(UserError, match=r"0 trial\(s\) with a result, but the page needs 2; see `rlhpc study status`"):
        invoke("study", "plot", str(folder.path), catch_exceptions=False)

"""The page of a study holds every trial, what matters by importance, and plots; it makes no request."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhpc.cli.main import cli
from rlhpc.core.errors import UserError
from rlhpc.launch.studies.study_page import compared_trials, importance
from tests.launch.studies.trial_stand_in import RATE, advance, begin, finish

COEFFICIENT = "algorithm.kl.coefficient"


def test_the_page_shows_every_trial_and_makes_no_request(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path, budget={"trials": 5, "at_once": 5})
    trials.outcome = lambda config: "<user>" if config.name.endswith("-3") else config.actor.optimizer.learning_rate
    finish(folder, trials)
    said = CliRunner().invoke(cli, ["study", "plot", str(folder.path)], catch_exceptions=False).output
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


def test_importance_is_of_the_key_that_decides(tmp_path: Path) -> None:
    """Also where only the first segment has all trials."""
    space = {RATE: {"low": 1e-5, "high": 1e-2, "log": True}, COEFFICIENT: {"low": 0.0, "high": 0.1}}
    known = {"space": space, "sampler": {"name": "RandomSampler"}, "budget": {"trials": 40, "at_once": 40}}
    folder, trials = begin(tmp_path, segments={"steps": [1, 2]}, **known)
    trials.curve = lambda config, step: -abs(config.algorithm.kl.coefficient - 0.03)
    finish(folder, trials)
    compared = compared_trials(folder)
    assert len(compared.trials) == 40
    shares = importance(compared)
    assert [*shares] == [COEFFICIENT, RATE]
    assert shares[COEFFICIENT] > 0.8


def test_a_page_needs_two_results(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path)
    advance(folder, trials)
    with pytest.raises(UserError, match=r"0 trial\(s\) with a result, but the page needs 2; see `rlhpc study status`"):
        CliRunner().invoke(cli, ["study", "plot", str(folder.path)], catch_exceptions=False)

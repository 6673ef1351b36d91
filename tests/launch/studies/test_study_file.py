"""``study.yaml`` and the commands on it: each error is one line that names the key and the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhpc.cli.main import cli
from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.config.study import load_study
from rlhpc.core.errors import UserError
from rlhpc.launch.studies.journal import make_sampler
from rlhpc.launch.studies.study_folder import base_of, create
from tests.docs.fields import SECTIONS, differences
from tests.helpers.plain_model import write_inputs
from tests.helpers.runs import ROOT
from tests.launch.studies.trial_stand_in import RATE, SPACE, begin, finish, study_of

DEMO = str(ROOT / "configs" / "demo.yaml")
PLAIN: dict[str, Any] = {"name": "search", "base": DEMO, "space": SPACE, "budget": {"trials": 3}}


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "study.yaml"
    file.write_text(yaml12.dump({**PLAIN, **changes}))
    return file


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"budgets": {}}, r"study\.yaml:\d+: budgets: unknown key; did you mean 'budget'\?"),
        ({"budget": {}}, r"study\.yaml:\d+: budget\.trials: is missing; add it"),
        ({"budget": {"trials": 0}}, r"budget\.trials: 0: input should be greater than or equal to 1"),
        ({"space": {RATE: {"low": 1.0}}}, rf"space\.{RATE}: needs either choices, or low and high"),
        ({"space": {RATE: {"low": 2, "high": 1}}}, r"low = 2 is above high = 1"),
        ({"space": {RATE: {"low": 0.0, "high": 1.0, "log": True}}}, r"log needs low above 0, and no step"),
        ({"space": {RATE: {"choices": [1], "log": True}}}, r"log and step are of a range, not of choices"),
        ({"space": {RATE: {**SPACE[RATE], "when": {"x": 1}}}}, r"when names x, which is not another key of the search"),
        (
            {"space": {"a": {"choices": [1], "when": {"b": 1}}, "b": {"choices": [1], "when": {"a": 1}}}},
            r"conditions of the space depend on each other in a circle",
        ),
        ({"objective": {"best": True, "last": 3}}, r"objective: best contradicts last"),
        (
            {"segments": {"steps": [20, 60]}},
            r"study\.yaml:\d+: segments: unknown key; end weak trials by `pruner: \{name: SuccessiveHalvingPruner\}`",
        ),
    ],
)
def test_an_error_of_the_file_is_one_line(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        load_study(written(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ({"name": "TPEsampler"}, r"sampler\.name: Optuna has no sampler 'TPEsampler'; did you mean 'TPESampler'"),
        ({"name": "TPESampler", "arguments": {"start": 1}}, r"sampler\.arguments: TPESampler: .*'start'; correct them"),
        ({"name": "GridSampler"}, rf"space\.{RATE}: has no values for a grid; give choices, or use another sampler"),
    ],
)
def test_an_error_of_the_sampler_is_one_line(tmp_path: Path, sampler: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_sampler(study_of(tmp_path, sampler=sampler))


def test_a_metric_that_no_run_has_is_refused(tmp_path: Path) -> None:
    study = study_of(tmp_path, objective={"metric": "rewards/mean"})
    with pytest.raises(UserError, match=r"objective\.metric: no metric 'rewards/mean'; did you mean"):
        base_of(study)


def test_a_study_goes_on_only_as_it_began(tmp_path: Path) -> None:
    folder, _ = begin(tmp_path)
    more = study_of(tmp_path, budget={"trials": 50})
    assert create(more, base_of(more), local=False) == folder
    other = study_of(tmp_path, space={RATE: SPACE[RATE]})
    with pytest.raises(UserError, match=r"space\.train\.minibatches differ\(s\) from the study in"):
        create(other, base_of(other), local=False)
    with pytest.raises(UserError, match="--local: the study began without it; go on as it began"):
        create(more, base_of(more), local=True)
    changed = base_of(more).model_copy(update={"seed": 7})
    with pytest.raises(UserError, match=r"seed differ\(s\) from .*base\.yaml, with which the study began"):
        create(more, changed, local=False)
    folder.study.unlink()  # as if the first command was killed before it wrote it
    assert create(more, base_of(more), local=False) == folder
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    full = study_of(tmp_path).model_copy(update={"folder": tmp_path / "full"})
    with pytest.raises(UserError, match="contains something else; choose another folder"):
        create(full, base_of(full), local=False)


def invoke(*words: str) -> str:
    done = CliRunner().invoke(cli, ["study", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_status_and_best_show_every_trial(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path, budget={"trials": 5, "at_once": 2})
    assert "none yet" in invoke("status", str(folder.path))
    with pytest.raises(UserError, match="no trial is complete yet"):
        invoke("best", str(folder.path))
    finish(folder, trials)
    found = json.loads(invoke("status", str(folder.path), "--json"))
    lines = invoke("status", str(folder.path)).splitlines()
    assert len(found["trials"]) == 5
    assert not differences(SECTIONS["`rlhpc study status`"], found)
    assert any(re.match(rf"{found['best']} \* +complete ", line) for line in lines)
    file = tmp_path / "best.yaml"
    invoke("best", str(folder.path), "--output", str(file))
    best = load_config(file)
    assert best.actor.optimizer.learning_rate == found["trials"][found["best"]]["values"][RATE]
    assert best.name == "search-best"
    with pytest.raises(UserError, match="study export: this command was removed; use `rlhpc study status"):
        invoke("export", str(folder.path), str(tmp_path / "trials.parquet"))


def test_a_dry_run_shows_the_cost_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = write_inputs(tmp_path)
    settings = yaml12.parse(base.read_text(), str(base))
    settings["slurm"] = {"time": 60, "gpus_per_node": 0}
    base.write_text(yaml12.dump(settings))
    budget = {"trials": 3, "at_once": 2, "gpu_hours": 5.0}
    said = invoke("run", str(written(tmp_path, base=str(base), budget=budget)), "--dry-run")
    assert "trials    3, at most 2 at once" in said
    assert "cost      at most 3.0 hours of 1 rank(s) by slurm.time, without retries" in said
    assert "limit     5 hours of ranks (budget.gpu_hours)" in said
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no study; begin one with `rlhpc study run FILE`"):
        invoke("status", str(tmp_path))

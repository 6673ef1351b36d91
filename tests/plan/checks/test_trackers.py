"""Trackers that cannot work are refused before a run starts, each in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.observe import check_trackers
from rlhpc.plan.checks.user_code import check_own_code
from tests.helpers.machine import lack_packages
from tests.helpers.runs import write_config


def loaded(folder: Path, *trackers: dict[str, Any], **changes: Any) -> RunConfig:
    return load_config(write_config(folder, observe__trackers=list(trackers), **changes))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "mlfow"}, "unknown kind 'mlfow'; allowed: mlflow or wandb"),
        ({"kind": "tensorboard"}, "unknown kind 'tensorboard'; set observe.tensorboard"),
        ({"kind": [1]}, "unknown kind '[1]'; allowed: mlflow or wandb"),
        ({}, "needs either kind or function; write kind: mlflow or wandb, or function: package.module:name"),
        ("wandb", "needs either kind or function; "),
        ({"kind": "wandb", "function": "a:b"}, "needs either kind or function; "),
        ({"kind": "wandb", "mode": "on"}, "mode: 'on' is not allowed; allowed: 'offline' or 'online'"),
        ({"kind": "wandb", "projekt": "x"}, "projekt: unknown key; did you mean 'project'?"),
        ({"function": "wandb"}, "function: 'wandb' is not allowed; allowed: a string that matches"),
        ({"kind": "mlflow", "name": "../x"}, "name: '../x' is not allowed"),
    ],
)
def test_an_entry_that_is_no_tracker_is_one_clear_line(tmp_path: Path, entry: Any, message: str):
    with pytest.raises(UserError) as error:
        loaded(tmp_path, entry)
    assert "observe.trackers.0" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("trackers", "name"),
    [
        ([{"kind": "mlflow"}, {"kind": "mlflow", "uri": "http://example"}], "mlflow"),
        ([{"kind": "wandb", "name": "tensorboard"}], "tensorboard"),
    ],
)
def test_names_are_unique(tmp_path: Path, trackers: list[dict[str, Any]], name: str):
    with pytest.raises(UserError, match=f"observe.trackers: duplicate name '{name}'; give each"):
        check_trackers(loaded(tmp_path, *trackers))
    check_trackers(loaded(tmp_path, *({**tracker, "name": f"t{n}"} for n, tracker in enumerate(trackers))))


@pytest.mark.parametrize(
    ("module", "tracker", "line"),
    [
        ("wandb", {"kind": "wandb"}, "observe.trackers.0: wandb is not installed; pip install 'rlhpc[wandb]'"),
        ("mlflow", {"kind": "mlflow"}, "observe.trackers.0: mlflow is not installed; pip install 'rlhpc[mlflow]'"),
        ("alembic", {"kind": "mlflow"}, "observe.trackers.0: alembic is not installed; pip install 'rlhpc[mlflow]'"),
        (
            "tensorboard",
            {"kind": "wandb"},
            "observe.tensorboard: tensorboard is not installed; pip install 'rlhpc[tensorboard]', or set it to false",
        ),
    ],
)
def test_a_tracker_without_its_library_names_the_extra(tmp_path: Path, monkeypatch, module, tracker, line):
    config = loaded(tmp_path, tracker)
    check_trackers(config)
    elsewhere = loaded(tmp_path, tracker, slurm={"conda": "somewhere"})
    lack_packages(monkeypatch, module)
    with pytest.raises(UserError) as error:
        check_trackers(config)
    assert str(error.value) == line
    check_trackers(elsewhere)
    lack_packages(monkeypatch, module, "torch")  # a login node
    check_trackers(config)


def test_a_tracker_of_ones_own_is_looked_for(tmp_path: Path):
    (tmp_path / "mine.py").write_text("class Tracker: pass\n")
    check_own_code(loaded(tmp_path, {"function": "mine:Tracker"}), tmp_path)
    with pytest.raises(UserError, match=r"observe.trackers.0.function: .*mine.py has no 'Tracke'"):
        check_own_code(loaded(tmp_path, {"function": "mine:Tracke"}), tmp_path)
    (warning,) = check_own_code(loaded(tmp_path, {"function": "absent_one:x"}), tmp_path)
    assert warning.startswith("observe.trackers.0.function: absent_one:x: no module 'absent_one'")

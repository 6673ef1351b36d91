"""Names of the user's own code are looked for without running it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.submit import make_plan
from rlhpc.plan.checks.user_code import check_own_code, import_paths
from tests.docs.pages import DOCS, ROOT

MODULE = """
import re, torch.nn as nn
from elsewhere import third
raise SystemExit("this must not run")
def score(): inner = 1
class Tool:
    def call(self): ...
if True:
    sometimes = score
first, (then, *rest) = 1, (2, 3)
"""


def config(*changes: str) -> RunConfig:
    return load_config(ROOT / "configs" / "demo.yaml", changes)


def error_line(folder: Path, name: str) -> str:
    """What is said of a reward of that name: an error, warnings or nothing."""
    try:
        return "".join(check_own_code(config(f"rewards.0.function={name}"), folder))
    except UserError as error:
        return str(error)


def test_all_paths_of_a_configuration_are_found() -> None:
    loaded = config(
        "algorithm.name=my_algorithm:RLOO",
        "model.family=my_family:MISTRAL",
        "data.filter=my_data:wanted",
        "rewards.0.function=null",
        "rewards=[{name: a, function: my_reward:score, arguments: {function: x:y}}]",
        "rollout.tools=[{name: t, function: my_notebook:Notebook.write}]",
        "actor.optimizer.function=my_optimizer:Lion",
        "train.dynamic_sampling={filter: my_filter:keep}",
        "slurm.environment={function: x:y}",
    )
    assert dict(import_paths(loaded)) == {
        "prepare.function": "rlhpc.data.arithmetic:make",
        "algorithm.name": "my_algorithm:RLOO",
        "model.family": "my_family:MISTRAL",
        "data.filter": "my_data:wanted",
        "rewards.0.function": "my_reward:score",
        "rollout.tools.0.function": "my_notebook:Notebook.write",
        "actor.optimizer.function": "my_optimizer:Lion",
        "train.dynamic_sampling.filter": "my_filter:keep",
    }


@pytest.mark.parametrize("name", ["score", "Tool.call", "sometimes", "first", "then", "rest", "third", "re", "nn"])
def test_what_a_file_binds_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "own" / "inner").mkdir(parents=True)
    (tmp_path / "own" / "inner" / "__init__.py").write_text(MODULE)
    assert not error_line(tmp_path, f"mine:{name}")
    assert not error_line(tmp_path, f"own.inner:{name}")


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    assert error_line(tmp_path, "mine:scor") == f"rewards.0.function: {file} has no 'scor'; did you mean 'score'?"
    assert error_line(tmp_path, "rlhpc.rewards.rules:maths") == ""
    assert "rules.py has no 'math'; did you mean 'maths'" in error_line(tmp_path, "rlhpc.rewards.rules:math")
    file.write_text("def score(:")
    assert error_line(tmp_path, "mine:score").startswith(f"rewards.0.function: {file} is not Python (invalid syntax")


@pytest.mark.parametrize("line", ["from elsewhere import *", "def __getattr__(name): ...", "globals().update(f())"])
def test_a_file_that_may_have_any_name_passes(tmp_path: Path, line: str) -> None:
    (tmp_path / "mine.py").write_text(line)
    assert not error_line(tmp_path, "mine:score")


def test_a_module_that_is_not_found_is_a_warning(tmp_path: Path) -> None:
    found = error_line(tmp_path, "no_such:score")
    assert found.startswith(f"rewards.0.function: no_such:score: no module 'no_such' neither in {tmp_path} nor among")
    assert sys.executable in found
    assert not check_own_code(config("rewards.0.function=no_such:score", "slurm.conda=other"), tmp_path), (
        "it may be there"
    )
    (tmp_path / "no_such").mkdir()
    assert not error_line(tmp_path, "no_such.inner:score"), "a folder may be a package"
    assert error_line(tmp_path, ".x:score"), "no name of a module"


def test_the_pages_examples_are_there() -> None:
    names = ("my_reward:score", "my_algorithm:RLOO", "my_family:MISTRAL", "my_tool:calculate", "my_optimizer:Lion")
    assert not [text for name in names if (text := error_line(DOCS / "examples", name))]


def test_a_submission_looks_for_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rules\.py has no 'math'; did you mean 'maths'"):
        make_plan([config("rewards.0.function=rlhpc.rewards.rules:math")], tmp_path)
    warnings = make_plan([config("rewards.0.function=no_such:score")], tmp_path).warnings
    assert any(warning.startswith("rewards.0.function: no_such:score: no module") for warning in warnings)

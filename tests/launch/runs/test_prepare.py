"""The prepare hook: a process of its own, whose user errors stay one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.schema import PrepareSection
from rlhpc.core.errors import UserError
from rlhpc.launch.runs import prepare
from rlhpc.launch.runs.prepare import run_prepare


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])


def hook(**arguments: object) -> PrepareSection:
    return PrepareSection(function="tests.launch.programs:prepare", arguments=arguments)


def test_the_hook_is_called_with_its_arguments(tmp_path):
    assert run_prepare(hook(folder=str(tmp_path)))
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_long_hook_shows_its_seconds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "_LINE_SECONDS", 0.02)
    assert run_prepare(hook(folder=str(tmp_path)))
    assert capsys.readouterr().out.startswith("preparing | 0 s\n")


def test_a_user_error_of_the_hook_is_raised():
    with pytest.raises(UserError, match=r"^prepare: no space; free some$"):
        run_prepare(hook(folder="unused", fail="user"))


def test_another_failure_shows_its_traceback(capfd):
    assert not run_prepare(hook(folder="unused", fail="the planted fault"))
    assert "RuntimeError: the planted fault" in capfd.readouterr().err


def test_arguments_that_do_not_fit_are_a_user_error():
    with pytest.raises(UserError, match=r"^prepare\.arguments: tests\.launch\.programs:prepare: missing a required"):
        run_prepare(hook(fodler="x"))


def test_a_hook_that_does_not_exist_is_a_user_error():
    with pytest.raises(UserError, match=r"^prepare\.function: 'tests\.launch\.programs' has no 'prepar'"):
        run_prepare(PrepareSection(function="tests.launch.programs:prepar"))

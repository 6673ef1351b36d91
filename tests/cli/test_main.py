"""The command line as a user meets it: separate processes, exit codes, one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc import __version__
from rlhpc.cli.main import cli
from rlhpc.config.load import json_schema
from rlhpc.core.errors import UserError
from tests.helpers.commands import invoke, rlhpc
from tests.helpers.plain_model import write_inputs

ROOT = Path(__file__).parents[2]


def error_line(*arguments: str) -> str:
    """The one line of a user's error."""
    done = rlhpc(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.strip()


@pytest.fixture
def config(tmp_path):
    return str(write_inputs(tmp_path))


def test_version():
    assert rlhpc("--version").stdout == f"rlhpc {__version__}\n"


def test_schema():
    assert json.loads(rlhpc("schema").stdout) == json.loads(json_schema())


def test_check_summarises_and_starts_nothing(config, tmp_path):
    done = rlhpc("run", config, "--check", "train.steps=5")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "layout",
        "backend",
        "batch",
        "model",
        "data",
        "ranks",
    ]
    assert "rl 5 steps" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_line_and_exit_code_2(config):
    line = error_line("run", config, "--check", "rolout.tp=2")
    assert line == "rlhpc: command line: rolout: unknown key; did you mean 'rollout'?"


@pytest.mark.parametrize("words", [["run"], ["run", "x.yaml", "--chek"], ["plan", "calibrate", "x.yaml"], ["nosuch"]])
def test_options_that_are_wrong_show_the_usage(words):
    """docs/configuration.md, docs/glossary.md: more than a line, with the exit code of wrong input."""
    done = invoke(*words)
    assert done.exit_code == 2
    assert done.output.startswith("Usage: ")


@pytest.mark.heavy
def test_a_run_that_cannot_work_is_refused_before_it_starts(config, tmp_path):
    assert error_line("run", config, "train.minibatches=3").startswith("rlhpc: train.minibatches: ")
    assert error_line("run", config, "slurm.nodes=2").startswith("rlhpc: slurm.nodes: ")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(config, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("{}\n")
    line = error_line("run", config, "--run-dir", str(other))
    assert line.endswith("already contains a run; resume it with --resume, or choose another folder with --run-dir")
    assert (other / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["n" * 300, "config.yaml/inside"])
def test_a_path_that_cannot_be_is_one_line(config, name, tmp_path):
    line = error_line("run", config, "--check", "--run-dir", str(tmp_path / name))
    assert line.startswith((f"rlhpc: {tmp_path / name}", "rlhpc: run_dir: "))


def test_check_waits_for_what_prepare_makes(config, tmp_path):
    hook = f"prepare={{function: 'tests.launch.programs:prepare', arguments: {{folder: {tmp_path / 'later'}}}}}"
    overrides = [hook, f"model.path={tmp_path / 'later' / 'model'}", f"data.train.0={tmp_path / 'later/train.jsonl'}"]
    done = rlhpc("run", config, "--check", *overrides)
    assert done.returncode == 0
    assert done.stdout.count("prepare makes it") == 2


@pytest.mark.heavy
def test_a_user_error_of_the_prepare_hook_is_one_line(config):
    hook = "prepare={function: 'tests.launch.programs:prepare', arguments: {folder: x, fail: user}}"
    assert error_line("run", config, hook) == "rlhpc: prepare: no space; free some"


@pytest.mark.heavy
def test_a_failure_of_the_prepare_hook_ends_the_run(config, tmp_path):
    done = rlhpc("run", config, "prepare={function: 'tests.launch.programs:prepare', arguments: {folder: x, fail: Oh}}")
    assert done.returncode == 1
    assert "RuntimeError: Oh" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["watch", "replay", "sync"])
def test_a_former_command_says_what_to_use(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: this command was removed; "):
        cli([name, "my-run", "--step", "3"], standalone_mode=False)

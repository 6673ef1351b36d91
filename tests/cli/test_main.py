"""The command line in separate processes: exit codes, one line for a mistake, configs, and the site file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhpc import __version__
from rlhpc.cli.main import cli
from rlhpc.cli.setup import configs
from rlhpc.config.load import json_schema, load_config
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
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


SHIPPED = Path(__file__).parents[2] / "rlhpc"


def printed(*arguments: str) -> str:
    return CliRunner().invoke(configs, arguments, catch_exceptions=False).output


def test_every_shipped_file_is_listed_once_with_a_line() -> None:
    rows = [line.split(maxsplit=1) for line in printed().splitlines()]
    files = [*SHIPPED.glob("configs/**/*.yaml"), *SHIPPED.glob("sbatch/*")]
    assert sorted(name for name, _ in rows) == sorted(file.name.removesuffix(".yaml") for file in files)
    assert [name for name, _ in rows[:3]] == ["demo", "site", "slurm_demo"]
    assert not [title for _, title in rows if len(title) > 100 or title.startswith("#")]


def test_a_printed_config_works_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text := printed("qwen2.5-7b-1node"))
    assert text.startswith(f"# yaml-language-server: $schema={SHIPPED}/configs/schema.json\n")
    assert read_model(load_config(Path("my.yaml")).model.path).num_layers == 28


def test_a_job_script_is_printed_as_it_is() -> None:
    assert printed("grpo.sbatch") == (SHIPPED / "sbatch" / "grpo.sbatch").read_text()


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"^dap: no shipped config or job script .*; did you mean 'dapo'\?"):
        printed("dap")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "site.yaml"
    file.write_text("slurm: {account: physics, partition: gpu}\nefficiency: {compute: 0.4}\n")
    monkeypatch.setenv(env.RLHPC_SITE, str(file))
    return file


GPUS = "slurm.gpus_per_node=8"


def lines(*arguments: str) -> list[str]:
    done = invoke(*arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_a_dry_run_shows_what_comes_from_the_site_file(tmp_path: Path, site: Path) -> None:
    shown = lines("submit", str(write_inputs(tmp_path)), "--dry-run", "slurm.partition=test", GPUS)
    assert "#SBATCH --account=physics" in shown
    assert "#SBATCH --partition=test" in shown
    assert shown[-1] == f"# from site file {site}: slurm.account, site.efficiency"


def test_a_dry_run_without_a_site_file_says_nothing_of_it(tmp_path: Path) -> None:
    assert not [line for line in lines("submit", str(write_inputs(tmp_path)), "--dry-run", GPUS) if "site file" in line]


def test_a_check_shows_it_too(tmp_path: Path, site: Path) -> None:
    shown = lines("run", str(write_inputs(tmp_path)), "--check")
    assert f"site    {site}: slurm.account, slurm.partition, site.efficiency" in shown

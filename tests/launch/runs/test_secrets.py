"""Secrets of the user end in no file of a run but those that hold them, and in no output."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.launch.resolved import resolved
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.runs.submit import Plan, make_plan, written_submission
from rlhpc.launch.slurm.executor import write_secrets
from rlhpc.launch.slurm.job_spec import SECRETS
from rlhpc.plan.checks.run import check_config
from tests.helpers.commands import rlhpc
from tests.helpers.plain_model import write_inputs
from tests.launch import leaking

ROOT = Path(__file__).parents[3]
LEAKING = "tests.launch.leaking"
# Secrets in the config, by their keys.
IN_CONFIG = {
    "slurm.environment.JOB_API_KEY": "Plant3d:inTheJob's environment",
    "slurm.environment.http_proxy": "http://me:Plant3d-forTheJob@proxy.example:80",
    "prepare.arguments.hub_token": "hf_Plant3dForPrepare0123456789",
    "rewards.0.arguments.judge_api_key": "Plant3d?judge&key",
    "rewards.0.arguments.endpoint": "https://me:Plant3d-judge@judge.example/v1",
}
HOLDERS = ("secrets.json", SECRETS)  # what may contain secrets


@pytest.fixture(autouse=True)
def planted(monkeypatch) -> dict[str, str]:
    """Everything planted, by where it is."""
    monkeypatch.chdir(ROOT)
    found = {**leaking.PLANTED, "HTTPS_PROXY": leaking.PROXY}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    expected = [IN_CONFIG[f"rewards.0.arguments.{name}"] for name in ("judge_api_key", "endpoint")]
    monkeypatch.setenv("EXPECTED", leaking.digest(*expected))
    return found


def needles() -> dict[str, str]:
    """Text that must be nowhere, by where it was planted."""
    whole = {**leaking.PLANTED, "HTTPS_PROXY": leaking.URL_SECRET}
    whole |= {key: value for key, value in IN_CONFIG.items() if "://" not in value}
    parts = {key: value.split(":")[2].split("@")[0] for key, value in IN_CONFIG.items() if "://" in value}
    return {**whole, **parts}


def leaks(text: str, found: Mapping[str, str] | None = None) -> list[str]:
    """Where the secrets in a text were planted; as they are, in JSON, in a URL."""
    wanted = needles() if found is None else found
    forms = {
        key: {value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")} for key, value in wanted.items()
    }
    return [key for key, values in forms.items() if any(value in text for value in values)]


def leaking_files(folder: Path, but: Iterable[str] = HOLDERS) -> dict[str, list[str]]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in but]
    found = {str(path.relative_to(folder)): leaks(path.read_bytes().decode("utf-8", "replace")) for path in files}
    return {name: keys for name, keys in found.items() if keys}


def overrides(folder: Path, **more: str) -> list[str]:
    changes = {
        **IN_CONFIG,
        "prepare.function": f"{LEAKING}:prepare",
        "prepare.arguments.folder": str(folder / "prepared"),
        "rewards.0.function": "rlhpc.rewards.rules:number",
        "resources.ranks_per_node": 1,
        **more,
    }
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "inputs").mkdir()
    return write_inputs(tmp_path / "inputs")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("program", "code"), [("say_all", 0), ("raise_all", 1), ("refuse_all", EXIT_USER_ERROR), ("record_all", 1)]
)
def test_no_file_of_a_run_and_no_output_has_a_secret(program, code, config, tmp_path, capfd):
    """Environment, settings and URLs, printed, logged, raised with their causes and as an error of the user."""
    loaded = load_config(config, overrides(tmp_path))
    run = loaded.folder
    if code == EXIT_USER_ERROR:
        with pytest.raises(UserError, match=r"^http://\*\*\*@proxy.example:3128: cannot use") as caught:
            run_here(loaded, entry=f"{LEAKING}:{program}")
        assert not leaks(f"{caught.value} {caught.value!r} {caught.value.where} {caught.value.remedy}")
    else:
        assert run_here(loaded, entry=f"{LEAKING}:{program}") == code
    shown = capfd.readouterr()
    files = {path.name for path in run.rglob("*") if path.is_file()}
    assert len(files) > 6, files
    assert not leaking_files(run)
    assert not leaks(shown.out + shown.err), shown
    kept = [path for path in run.rglob("*") if path.name in HOLDERS]
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600]
    if program == "say_all":
        log = next(run.rglob("rank-00000.log")).read_text()
        assert "'HF_TOKEN': '***'" in log
        assert "http://***@proxy.example:3128" in log


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["submit", "CONFIG", "--dry-run"], "export MY_TOKEN=***"),
        (["run", "CONFIG", "--check"], "warning slurm.setup.0: has a secret"),
        (["plan", "run", "CONFIG"], "layout"),
        (["run", "CONFIG", "--check", "slurm.environment=[JOB_API_KEY=Plant3d-wrong]"], "['JOB_API_KEY=***'] is not"),
        (["run", "CONFIG", "--check", "slurm.environment.JOB_API_KEY.x=1"], 'JOB_API_KEY = "***" has no keys inside'),
        (
            ["run", "CONFIG", "--check", "rewards.0.time_limit_seconds={api_key: Plant3d-wrong}"],
            "'***'} is not allowed",
        ),
    ],
)
def test_no_command_shows_a_secret(words, expected, config, tmp_path):
    changes = overrides(tmp_path, **{"slurm.setup.0": "export MY_TOKEN=Plant3d/setup"})
    changes = [change for change in changes if not change.startswith("prepare.")]
    done = rlhpc(*(config if word == "CONFIG" else word for word in words[:3]), *changes, *words[3:])
    shown = done.stdout + done.stderr
    assert not leaks(shown, {**needles(), "setup": "Plant3d/setup", "wrong": "Plant3d-wrong"}), shown
    assert expected in shown


def test_a_job_gets_its_secrets_from_a_file_of_its_own(config, tmp_path):
    """The script, of which Slurm keeps copies, has none; in its shell they are set before slurm.setup."""
    job = tmp_path / "job's"
    job.mkdir()
    printing = 'printf "%s\\n" "$PLAIN" "$JOB_API_KEY" "$http_proxy"'
    more = {"slurm.environment.PLAIN": "it's", "slurm.setup.0": printing, "run_dir": str(job)}
    plan = make_plan([load_config(config, overrides(tmp_path, **more))], tmp_path)
    assert not leaks(f"{plan.script} {plan} {plan.warnings}")
    plan.submission.mkdir()
    write_secrets(plan.spec, plan.submission)
    file = plan.submission / SECRETS
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    done = bash(plan)
    expected = ["it's", *(IN_CONFIG[f"slurm.environment.{name}"] for name in ("JOB_API_KEY", "http_proxy"))]
    assert done.stdout.splitlines() == expected, done.stderr
    file.unlink()
    done = bash(plan)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"slurm.environment: cannot read {file}" in done.stderr


def bash(plan: Plan) -> subprocess.CompletedProcess[str]:
    """The script's lines before the command, in a real shell."""
    lines = "\n".join(plan.spec.setup)
    return subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=False)


def test_a_line_of_setup_with_a_secret_is_not_shown_when_it_fails(config, tmp_path):
    setup = json.dumps(["export MY_TOKEN=Plant3d/setup", "false Plant3d/setup"])
    plan = make_plan([load_config(config, [f"slurm.setup={setup}", "slurm.gpus_per_node=1"])], tmp_path)
    done = bash(plan)
    assert done.returncode != 0
    assert done.stderr.endswith(
        ": slurm.setup: failed: a line, which is not shown because there is a secret among them\n"
    )
    (warning,) = [text for text in plan.warnings if "secret" in text]
    assert warning.startswith("slurm.setup.0: has a secret in the job script, of which Slurm keeps copies; put it into")


def test_runs_of_an_array_that_differ_in_a_secret_do_not_show_it(config, tmp_path):
    changes = [
        [f"name=r{n}", f"run_dir={tmp_path / str(n)}", f"slurm.environment.JOB_API_KEY=Plant3d{n}"] for n in (1, 2)
    ]
    with pytest.raises(UserError, match=r"slurm.environment: {'JOB_API_KEY': '\*\*\*'} in 'r1'"):
        make_plan([load_config(config, [*change, "slurm.gpus_per_node=1"]) for change in changes], tmp_path)


def test_a_saved_configuration_loads_as_it_was(config, tmp_path):
    """From the run folder, from an attempt's, and with a new value; not from a copy elsewhere."""
    before = load_config(config, overrides(tmp_path))
    run = RunFolder(tmp_path / "saved").create()
    attempt = run.attempt(1).config
    attempt.parent.mkdir()
    save_config(run, before)
    save_config(run, before, attempt)
    assert not leaking_files(run.path)
    assert stat.S_IMODE(run.secrets.stat().st_mode) == 0o600
    assert load_config(run.config) == load_config(attempt) == before
    key = "rewards.0.arguments.judge_api_key"
    assert load_config(run.config, [f"{key}=new"]).rewards[0].arguments["judge_api_key"] == "new"
    copy = tmp_path / "copy.yaml"
    write_atomic(copy, run.config.read_text())
    with pytest.raises(
        UserError, match=r"copy.yaml:\d+: .+: the value was left out \(\*\*\*\) when .+; write it again"
    ):
        load_config(copy)
    save_config(run, load_config(config))
    assert not run.secrets.exists()
    assert "***" not in run.config.read_text()


def write_and_fail(config: RunConfig, run: RunFolder) -> None:
    with written_submission(config, run):
        assert load_config(run.config) == resolved(config, run)
        raise OSError("refused")


def test_a_refused_submission_leaves_secrets_as_they_were(config, tmp_path):
    key = "rewards.0.arguments.judge_api_key"
    before = load_config(config, overrides(tmp_path))
    run = RunFolder(before.folder).create()
    for now in (load_config(config), load_config(config, overrides(tmp_path, **{key: "Plant3d-new"}))):
        save_config(run, before)
        with pytest.raises(OSError, match="refused"):
            write_and_fail(now, run)
        assert load_config(run.config) == before
        assert stat.S_IMODE(run.secrets.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("key", "value", "reader"),
    [
        ("slurm.comment", "see https://me:Plant3d@host/", "in the queue"),
        ("slurm.srun_options", ["--export=ALL,MY_TOKEN=Plant3d1"], "on srun's command line"),
        ("slurm.sbatch_options.export", "ALL,MY_TOKEN=Plant3d1", "in the job script"),
        ("slurm.container", {"runtime": "apptainer", "image": "docker://me:Plant3d@host/x"}, "on srun's command line"),
    ],
)
def test_a_secret_that_others_could_read_is_a_warning(key, value, reader, config):
    rows = check_config(load_config(config, [f"{key}={json.dumps(value)}"]))
    (warning,) = [text for topic, text in rows if topic == "warning" and "secret" in text]
    assert warning.startswith(key)
    assert reader in warning
    assert "Plant3d" not in warning

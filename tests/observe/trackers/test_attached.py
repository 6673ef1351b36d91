"""What is attached to a tracker's run: all that explains it, and no secret."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core.folder import RunFolder
from rlhpc.observe.trackers.facts import record_facts, recorded_environment
from rlhpc.observe.trackers.libraries import deliveries
from tests.helpers.runs import write_config
from tests.observe.trackers.steps import append, new_run, steps
from tests.observe.trackers.test_libraries import mlflow_run

SECRETS = {
    "config": "c0nfig-Password-1",
    "environment": "Env1ronment-token-2",
    "listed": "Listed-variable-key-3",
    "remote": "rem0te-password-4",
    "wandb": "0123456789abcdef0123456789abcdef01234567",
}


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's repository, with changes that are not committed and secrets in all places."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "reward.py").write_text("def score():\n    return 1\n")
    user = ["-c", "user.name=x", "-c", "user.email=x@y.z"]
    remote = f"https://someone:{SECRETS['remote']}@git.example/code.git"
    for command in (
        ["init", "-q", "-b", "trunk"],
        ["remote", "add", "origin", remote],
        ["add", "."],
        [*user, "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    (folder / "reward.py").write_text("def score():\n    return 2\n")
    (folder / "new.py").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MY_TOKEN", SECRETS["environment"])
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["wandb"])
    monkeypatch.setenv("VLLM_API_KEY", SECRETS["listed"])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_COMMENT", f"of {SECRETS['environment']}")
    return folder


def run_of(tmp_path: Path, *trackers: dict[str, Any]) -> tuple[RunFolder, Any]:
    folder = new_run(tmp_path)
    folder.trackers.path.mkdir()
    arguments = {"folder": "x", "api_key": SECRETS["config"]}
    observe = {"tensorboard": False, "trackers": list(trackers)}
    config = load_config(write_config(tmp_path, observe=observe, prepare__arguments=arguments))
    save_config(folder, config)
    return folder, config


def leaks(folder: Path) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "secrets.json"]
    return [f"{file}: {kind}" for file in files for kind, text in SECRETS.items() if text.encode() in file.read_bytes()]


def test_facts_explain_the_run(tmp_path: Path, code: Path):
    folder, _ = run_of(tmp_path)
    record_facts(folder, code)
    found = json.loads(folder.trackers.facts.read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert found["code"] == {
        "commit": commit,
        "branch": "trunk",
        "remote": "https://***@git.example/code.git",
        "folder": str(code),
        "dirty": True,
        "changed": ["M reward.py", "?? new.py"],
    }
    assert found["packages"]["pydantic"]
    assert found["machine"]["cpus"] == os.cpu_count()
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert found["environment"]["VLLM_API_KEY"] == "***"
    assert not {"MY_TOKEN", "HOME", "PATH"} & set(found["environment"])
    assert not leaks(folder.path)


def test_without_a_repository_or_git_there_are_the_other_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = run_of(tmp_path)
    record_facts(folder, tmp_path)
    assert json.loads(folder.trackers.facts.read_text())["code"] == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    record_facts(folder, Path(__file__).parent)
    assert json.loads(folder.trackers.facts.read_text())["code"] == {}


def test_only_listed_variables_are_recorded():
    given = {"HOME": "/home/me", "NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x" * 20, "SLURM_JOB_ID": "7"}
    assert recorded_environment(given) == {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}


@pytest.mark.workers
def test_trackers_have_all_files_and_no_secret(tmp_path: Path, code: Path):
    folder, config = run_of(tmp_path, {"kind": "mlflow"}, {"kind": "wandb"})
    record_facts(folder, code)
    append(folder, steps(3, 2))
    folder.report.mkdir()
    for one in deliveries(folder, config, ["mlflow", "wandb"]):
        one.deliver()
        folder.report_text.write_text("the end\n")
        one.deliver(last=True)
        assert not one.failure
    files = {"config.yaml", "facts.json", "report.txt"}
    client, run = mlflow_run(folder)
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == files
    assert run.data.params["model.dtype"] == "float32"
    assert run.data.params["prepare.arguments.api_key"] == "***"
    (offline,) = folder.trackers.files("wandb").glob("wandb/offline-run-*/files")
    assert {file.name for file in offline.iterdir()} >= files
    assert not leaks(folder.path)
    assert [file.name for file in folder.path.rglob("*") if file.is_file() and b"NCCL_DEBUG" in file.read_bytes()]

"""docs/scripting.md names the fields of every command's JSON, all of them and nothing else, and the exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from rlhpc.cli import output
from rlhpc.cli.main import cli
from rlhpc.cli.plan_run import measure_json
from rlhpc.cli.run import jobs_json
from rlhpc.core import attempts, errors, exits
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs import follow
from rlhpc.launch.runs.run_registry import JobRecord, RunEntry
from rlhpc.launch.runs.status import as_json, run_status
from rlhpc.launch.supervise import local
from rlhpc.observe.alerts.record import Alert, AlertFile
from rlhpc.observe.training_samples import encoded, file_of
from rlhpc.plan.measure import Measurement
from tests.cli.test_plan import STEP
from tests.docs.fields import PAGE, SECTIONS, differences
from tests.docs.pages import ROOT
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs, write_model
from tests.launch.runs import test_status

READY = [str(ROOT / "configs/ready/qwen2.5-7b-1node.yaml"), f"model.path={ROOT}/configs/ready/models/Qwen2.5-7B"]


def printed(*arguments: str, code: int = 0) -> Any:
    result = invoke(*arguments, catch_exceptions=False)
    assert result.exit_code == code
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("value", "different"),
    [
        ({"a": 1, "b": [{"c": {"x": 1}}], "e": {"one": {"f": 2}}}, set()),
        ({"a": 1, "b": [], "d": 3, "e": {}}, set()),
        ({"b": [{}], "e": {"one": {}}}, {"a", "b[].c", "e.NAME.f"}),
        ({"a": 1, "b": [{"c": 1, "g": 1}], "e": {}, "h": 1}, {"b[].g", "h"}),
    ],
)
def test_a_difference_is_seen(value: Any, different: set[str]) -> None:
    fields = {"a": True, "b": True, "b[].c": True, "d": False, "e": True, "e.NAME.f": True}
    assert differences(fields, value) == different


def samples_run(folder: Path) -> str:
    run = RunFolder(folder)
    run.config.write_text("name: x\n")
    run.training_samples.mkdir()
    for step in (1, 2):
        file_of(run, step).write_bytes(encoded([{"step": step, "prompt": "1+1=", "reward": 1.0}]))
    return str(folder)


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    """A section, and a document that its command printed."""
    yield "`rlhpc plan run`", printed("plan", "run", *READY, "--json")
    yield "`rlhpc plan search`", printed("plan", "search", *READY, "--json")
    yield "`rlhpc plan search --gpus`", printed("plan", "search", *READY, "--gpus", "8", "--json")
    (folder / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    yield "`rlhpc plan calibrate`", printed("plan", "calibrate", READY[0], str(folder), READY[1], "--json")
    yield "`rlhpc configs`", printed("configs", "--json")
    (folder / "samples").mkdir()
    run = samples_run(folder / "samples")
    yield "`rlhpc samples`", printed("samples", run, "--training", "--json")
    (folder / "inputs").mkdir()
    config = str(write_inputs(folder / "inputs"))
    yield "`rlhpc run --check`, `rlhpc eval --check`", printed("run", config, "--check", "--json")
    dry = printed("submit", config, "--dry-run", "slurm.gpus_per_node=1", "--json")
    yield "`rlhpc submit --dry-run`", dry


@pytest.mark.heavy
def test_documents_have_the_fields_of_the_page(tmp_path: Path) -> None:
    different = {section: differences(SECTIONS[section], value) for section, value in cases(tmp_path)}
    assert different == {key: set() for key in different}
    assert len(different) == 8


def test_a_run_s_state_has_the_fields_of_the_page(tmp_path: Path) -> None:
    run = test_status.make_run(tmp_path / "run")
    attempts.end(test_status.begin(run), test_status.verdict("crash", "retry"))
    AlertFile(run.folder).add(Alert(1.0, "rl", 7, "kl", "warning", "kl is high"))
    found = as_json(run_status(run, test_status.job("RUNNING")))
    assert len(found["alerts"]) == 1
    assert not differences(SECTIONS["`rlhpc status`"], [json.loads(output.json_text(found))])


def test_logs_have_the_fields_of_the_page(tmp_path: Path) -> None:
    run = test_status.make_run(tmp_path / "run")
    folder = test_status.begin(run)
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "rank-00000.log").write_text("one\ntwo\n")
    found = printed("logs", str(run.folder.path), "--json", "--lines", "1")
    assert not differences(SECTIONS["`rlhpc logs`"], found)
    assert found[0]["lines"] == ["two"]


def test_submitted_jobs_have_the_fields_of_the_page(tmp_path: Path) -> None:
    record = JobRecord("7", "", 0.0, "me", "tiny", str(tmp_path), "log")
    found = jobs_json([RunEntry(RunFolder(tmp_path), record)], {"7": "queued"})
    assert not differences(SECTIONS["`rlhpc submit`, `rlhpc resume`, `rlhpc eval --submit`"], found)
    assert found[0]["queue"] == "queued"


def test_measurements_have_the_fields_of_the_page(tmp_path: Path) -> None:
    found = measure_json([Measurement("model.path", tmp_path, 2)])
    assert not differences(SECTIONS["`rlhpc plan measure`"], found)


def test_conversions_have_the_fields_of_the_page(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    dry = next(name for name in SECTIONS if "`rlhpc convert hf-to-megatron --dry-run`" in name)
    found = printed("convert", "hf-to-megatron", str(model), str(tmp_path / "made"), "--dry-run", "--json")
    assert not differences(SECTIONS[dry], found)
    found = printed("convert", "verify", str(model), str(tmp_path / "none"), "--json", code=1)
    assert not differences(SECTIONS["`rlhpc convert verify`"], found)
    assert (found["equal"], len(found["faults"])) == (False, 1)


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for word, inner in command.commands.items():
            yield from leaves(inner, f"{name} {word}")
    else:
        yield name, command


def test_every_command_has_json_or_a_reason() -> None:
    named = {words for section in SECTIONS for words in re.findall(r"`(rlhpc [a-z -]*?)(?: --[a-z-]+)?`", section)}
    reasons = PAGE.read_text(encoding="utf-8").partition("## Commands without `--json`")[2]
    for name, command in leaves(cli, "rlhpc"):
        has = any(option.name == "as_json" for option in command.params)
        assert has == (name in named), name
        assert has or f"`{name}`" in reasons, name


def test_exit_codes_are_those_of_the_code() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Exit codes")[2].partition("A rank ends")[0]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)}
    assert (errors.EXIT_USER_ERROR, errors.EXIT_DOES_NOT_FIT) == (2, 3)
    assert (exits.EXIT_DISK_FULL, exits.EXIT_STORAGE) == (74, 75)
    assert local.INTERRUPTED == follow.INTERRUPTED == 130
    assert documented == {0, 1, errors.EXIT_USER_ERROR, errors.EXIT_DOES_NOT_FIT, exits.EXIT_STORAGE, local.INTERRUPTED}
    assert f"with {exits.EXIT_DISK_FULL} on a full disk" in PAGE.read_text(encoding="utf-8")


CODE = """
import sys
from rlhpc.cli import main
from rlhpc.core.errors import DoesNotFitError, UserError

def raises(error):
    raise error

sys.argv = ["rlhpc", "schema"]
for error in ERRORS:
    main.cli.commands["schema"].callback = lambda **_: raises(error)
    try:
        main.main()
    except SystemExit as end:
        print(end.code)
    except Exception as passed:  # a traceback, and Python's own code 1
        print(1 if passed is error else passed)
"""
CODES = {
    "UserError('x')": 2,
    "DoesNotFitError('x')": 3,
    "FileNotFoundError(2, 'No such file', 'x')": 2,
    "ModuleNotFoundError('x', name='numpy')": 2,
    "OSError(5, 'I/O error')": 75,
    "RuntimeError('ours')": 1,
}


def test_each_error_has_its_exit_code() -> None:
    code = CODE.replace("ERRORS", f"({', '.join(CODES)})")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(code) for code in CODES.values()]
    assert len(done.stderr.splitlines()) == 5  # a line for each error that is not ours


def test_wrong_use_has_code_2() -> None:
    assert invoke("schema", "--none").exit_code == 2

"""Text that others wrote is shown as it is: no markup is read in it, and no control character reaches the terminal."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli import main
from rlhpc.cli.plan_run import _rendered
from rlhpc.cli.sample_view import show_samples
from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Best, Verdict
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.shown import ShownOnly, show
from rlhpc.core.storage import say
from rlhpc.core.terminal import Terminal
from rlhpc.launch.runs.run_registry import JobRecord, RunEntry
from rlhpc.launch.runs.status import AttemptStatus, RunStatus
from rlhpc.launch.runs.status_view import details, overview
from rlhpc.launch.slurm.queue import JobStatus
from rlhpc.observe.alerts.record import Alert
from rlhpc.observe.engine_activity import EngineRow, SidesStatus
from rlhpc.observe.progress import Display
from rlhpc.observe.report import write_evaluation
from tests.helpers.commands import invoke
from tests.test_layers import MODULES, tree_of

# A message of gloo, as in a rank's error, then what a terminal would obey: clear, title, colour, bell, overwrite.
GLOO = "[/__w/pytorch/gloo/pair.cc:534] [rank3]: [bold]lost[/bold] :smile:"
HOSTILE = f"{GLOO} \x1b[2J\x1b]0;title\x07\x9b31m\r\x08\x7f\u202e"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def check(text: str, *, whole: bool = True) -> None:
    """``whole``: the message is there too, but for line breaks."""
    assert not CONTROL.findall(text)
    if whole:
        assert "".join(GLOO.split()) in "".join(text.split())


def hostile(value: Any) -> Any:
    """The value with each text in it replaced, in the fields of dataclasses too."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, RunFolder | AttemptFolder):
        return type(value)(Path("/runs") / HOSTILE.replace("/", "_"))
    if is_dataclass(value):
        return type(value)(**{field.name: hostile(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    return value


def status(state: str = "failed", job_state: str = "RUNNING") -> RunStatus:
    attempt = Attempt(1, "7", 0, ("node1", "node2"), 4, time.time(), -1, overrides=("a=1",), excluded=("node3",))
    ended = Verdict(time.time(), "crash", "lost", "retry", 3, "node1", "detail", 0.0, ("a=2",), ("node4",))
    found = RunStatus(
        RunEntry(RunFolder(Path("/runs/tiny")), JobRecord("7", "c", time.time(), "alice", "tiny", "/", "/log")),
        state,
        JobStatus("7", job_state, "Priority", time.time(), time.time(), 60, "node[1-2]", 1, "1:0"),
        (),
        *("rl", 3, 9, 0.5, 1000.0, (1, 2)),
        Best(2, "validation/reward_mean", 0.5),
        attempts=(AttemptStatus(attempt, ended),),
        unreadable="Input/output error",
        alerts=(Alert(time.time(), "rl", 3, "reward", "error", "fell", "stop"),),
        sides=SidesStatus(3, 0.5, 1, 2, (EngineRow(0, 1, 10.0, 0.5, 3),)),
        exports=(2,),
    )
    return hostile(found)


def printed(what: Any, width: int, **options: Any) -> str:
    out = StringIO()
    Terminal(file=out, width=width, height=40, color_system=None, **options).print(what)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 100, 200])
def test_every_field_of_a_status_is_shown_as_it_is(width: int) -> None:
    check(printed(details(status()), width), whole=width > 60)
    check(printed(overview([status()]), width), whole=False)
    assert "[rank3]" in printed(overview([status()]), width)


def test_samples_are_shown_as_they_are(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    record = dict.fromkeys(("prompt", "response", "expected", "set", "source"), HOSTILE)
    record |= {"reward": 1.0, "parts": {HOSTILE: HOSTILE}, "truncated": True, "response_length": 3}
    show_samples([record, {**record, "messages": [{"role": "tool", "content": HOSTILE}, {"content": HOSTILE}]}])
    check(capsys.readouterr().out)


def test_an_evaluation_shows_names_of_sets_as_they_are(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    write_evaluation(folder, {"reward_mean": 0.5, f"by_source/{HOSTILE}/reward_mean": 0.5})
    text = folder.report_text.read_text()
    check(text, whole=False)
    assert "[rank3]" in text


def test_lines_of_the_launcher_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show(HOSTILE)
    check(capsys.readouterr().out)
    for report in (lambda: show(HOSTILE, file=sys.stderr), lambda: say(HOSTILE)):
        report()
        check(capsys.readouterr().err)
    with ShownOnly(HOSTILE):
        raise RuntimeError(HOSTILE)
    check(capsys.readouterr().err)
    check(str(UserError(HOSTILE, where=HOSTILE, remedy=HOSTILE)))
    with Display(plain_seconds=0.0) as display:
        display.update([], HOSTILE, [{"rule": HOSTILE, "message": HOSTILE}])
        display.update([{"phase": HOSTILE, "step": 1, "total_steps": 2, "reward/mean": 0.1}], ranks=HOSTILE)
    both = capsys.readouterr()
    check(both.out)
    check(both.err)


def test_a_table_of_the_plan_is_shown_as_it_is() -> None:
    check("\n".join(_rendered(HOSTILE)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run on this machine whose records are all hostile."""
    folder = RunFolder(tmp_path / "run")
    known = {"job_id": HOSTILE, "restart_count": 0, "nodes": (HOSTILE,), "world_size": 1, "saved_step": -1}
    attempt = attempts.begin(folder, **known, overrides=(HOSTILE,), excluded=(HOSTILE,))
    attempts.end(attempt, hostile(Verdict(1.0, "crash", "lost", "stop", 0, "node1")))
    (attempt.logs / "rank-00000.log").write_text(f"{HOSTILE}\n\x1b[32mINFO\x1b[0m 10%\r20%\n")
    folder.config.write_text("name: tiny\n")
    record = {"phase": HOSTILE, "step": 1, "total_steps": 2, "time": 1.0, "reward/mean": 0.5, HOSTILE: 1.0}
    folder.metrics.write_text(json.dumps(record) + "\n")
    alert = {"time": 1.0, "phase": HOSTILE, "step": 1, "rule": HOSTILE, "severity": HOSTILE, "message": HOSTILE}
    folder.alerts.write_text(json.dumps({**alert, "action": HOSTILE, "value": 1.0}) + "\n")
    sample = {"step": 1, "prompt": HOSTILE, "response": HOSTILE, "expected": "3", "reward": 1.0, "source": HOSTILE}
    folder.samples.write_text(json.dumps(sample) + "\n")
    return folder.path


@pytest.mark.parametrize("words", ["status", "status --json", "logs", "logs --json", "samples"])
def test_a_command_shows_a_runs_records_as_they_are(run: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    command, *options = words.split()
    done = invoke(command, str(run), *options, catch_exceptions=False)
    assert done.exit_code == 0
    check(done.output)


def test_a_log_is_shown_without_colours_and_overwritten_lines(run: Path) -> None:
    assert invoke("logs", str(run)).output.splitlines()[-2:] == ["INFO 10%", "20%"]


def test_an_error_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhpc", "status", HOSTILE])
    with pytest.raises(SystemExit):
        main.main()
    check(capsys.readouterr().err.replace(repr("\x1b")[1:-1], ""))


def unguarded(tree: ast.AST) -> Iterator[str]:
    """Calls that show text as it comes."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            name = ast.unparse(call.func)
            if name in ("click.echo", "click.secho", "Console", "rich.print", "Text.from_markup", "print"):
                yield name


@pytest.mark.heavy
def test_commands_and_launcher_show_text_in_one_place_each() -> None:
    rooms = ("rlhpc.cli", "rlhpc.core", "rlhpc.launch", "rlhpc.observe", "rlhpc.plan")
    found = {module: {*unguarded(tree_of(module))} for module in MODULES if module.startswith(rooms)}
    assert {module: names for module, names in found.items() if names} == {
        "rlhpc.cli.output": {"click.echo"},
        "rlhpc.core.shown": {"print"},
        "rlhpc.core.storage": {"print"},
        "rlhpc.launch.runs.status_view": {"print"},
        "rlhpc.launch.worker.use_gpu": {"print"},  # JSON for the rank that starts it
        "rlhpc.observe.trackers.__main__": {"print"},
    }

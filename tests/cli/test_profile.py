"""``rlhpc profile``: what is asked of a run, what is refused, what is listed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.profiles import EVERY, ProfileAnswer, Range, Selection, read_request, write_answer
from rlhpc.launch.run_lock import locked
from tests.cli.test_light import HEAVY, modules_after
from tests.docs.fields import SECTIONS, differences
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run of four ranks on this machine, seven steps of fifty done."""
    config = load_config(write_inputs(tmp_path), ["resources.ranks_per_node=4", "train.steps=50"])
    folder = RunFolder(tmp_path / "run")
    attempt = attempts.begin(folder, job_id="", restart_count=0, nodes=("a",), world_size=4, saved_step=-1)
    save_config(folder, config)
    save_config(folder, config, attempt.config)
    folder.metrics.write_text(json.dumps({"phase": "rl", "step": 7, "total_steps": 50}) + "\n")
    with locked(folder):
        yield folder


def command(*words: object) -> Result:
    return invoke("profile", *words)


def refusal(*words: object) -> str:
    result = command(*words)
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_a_request_is_what_was_asked_for(run: RunFolder) -> None:
    asked = command(run.path, "40-42", "--ranks", "0,2-3", "--phases", "update, rollout", "--tools", "torch,py-spy")
    assert asked.exit_code == 0, asked.output
    request = read_request(run)
    assert request is not None
    assert request.selection == Selection(
        40, 42, (Range(0, 0), Range(2, 3)), ("update", "rollout"), ("torch", "py-spy")
    )
    assert not request.relative


@pytest.mark.parametrize(("steps", "first"), [("next", 1), ("+3", 3)])
def test_steps_may_count_from_the_running_one(run: RunFolder, steps: str, first: int) -> None:
    assert command(run.path, steps, "--ranks", "all").exit_code == 0
    request = read_request(run)
    assert request is not None
    assert (request.selection, request.relative) == (Selection(first, first, (EVERY,)), True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["7"], "STEPS: step 7 has passed; ask for step 9 or later, or for next"),
        (["8-9"], "STEPS: step 8 is running; ask for step 9 or later"),
        (["51"], "STEPS: step 51 is after the last one, 50; ask for steps up to 50"),
        (["forty"], "STEPS: 'forty' is not a number or a range"),
        (["next", "--ranks", "4"], "--ranks: no rank 4: the run has 4; use ranks up to 3, or all"),
        (["next", "--ranks", "a"], "--ranks: 'a' is not a number"),
        (["next", "--phases", "updat"], "--phases: unknown name 'updat'; did you mean 'update'?"),
        (["next", "--tools", "pyspy"], "--tools: unknown name 'pyspy'; did you mean 'py-spy'?"),
        (["next", "--tools", "nsys"], "Nsight Systems must start the ranks, and this run was started without"),
        (["next", "--ranks", ",".join("0" * 17)], "--ranks: 17 numbers and ranges"),
    ],
)
def test_what_the_run_cannot_do_is_refused_in_one_line(run: RunFolder, words: list[str], message: str) -> None:
    assert message in refusal(run.path, *words)
    assert read_request(run) is None


def test_a_run_that_is_over_is_refused(run: RunFolder) -> None:
    attempts.end(run.attempt(1), Verdict(0.0, "finished", "", "none"))
    assert "the run is over; set profile.steps" in refusal(run.path, "next")


def test_the_run_s_own_refusal_is_the_answer(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: RunFolder, request: object) -> None:
        write(folder, request)
        answered = read_request(folder)
        assert answered is not None
        write_answer(folder, ProfileAnswer(answered.id, answered.selection, "no CUDA"))

    from rlhpc.launch.runs import profile

    write = profile.write_request
    monkeypatch.setattr(profile, "write_request", refuse)
    assert refusal(run.path, "next", "--tools", "memory", "--wait") == "run: no CUDA"
    assert "refused: step 1: no CUDA" in command(run.path).output


def test_profiles_are_listed(run: RunFolder) -> None:
    assert command(run.path).output == "no profiles yet\n"
    folder = run.profile(5)
    folder.mkdir(parents=True)
    trace = folder / "rank-00002.trace.json.gz"
    trace.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    record = {"step": 5, "rank": 2, "time": 1.0, **Selection(5, 5).as_json(), "files": [trace.name], "warnings": ["x"]}
    (folder / "rank-00002.json").write_text(json.dumps(record))
    shown = command(run.path).output
    assert str(trace) in shown
    assert "warning: step 5, rank 2: x" in shown
    (found,) = json.loads(command(run.path, "--json").output)
    assert (found["step"], found["rank"], found["files"]) == (5, 2, [str(trace)])
    assert json.loads(command(trace, "--json").output)["rows"] == []


def test_documents_have_the_fields_of_the_page(run: RunFolder) -> None:
    folder = run.profile(5)
    folder.mkdir(parents=True)
    record = {"step": 5, "rank": 2, "time": 1.0, **Selection(5, 5).as_json(), "files": [], "warnings": ["x"]}
    (folder / "rank-00002.json").write_text(json.dumps(record))
    trace = folder / "rank-00002.trace.json"
    trace.write_text(json.dumps([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]))
    documents = {
        "`rlhpc profile`": [run.path],
        "`rlhpc profile` with steps": [run.path, "next"],
        "`rlhpc profile` of a trace": [trace],
    }
    for section, words in documents.items():
        assert not differences(SECTIONS[section], json.loads(command(*words, "--json").output)), section


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    trace = tmp_path / "a.trace.json"
    trace.write_text('{"traceEvents": []}')
    assert not modules_after("profile", str(trace)) & {*HEAVY, "numpy", "pydantic", "submitit"}

"""``rlhpc samples`` on training steps: what is shown, compared, followed, printed as JSON, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli import status
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.observe.training_samples import COLUMNS, encoded, file_of
from tests.helpers.commands import invoke

ROOT = Path(__file__).parents[2]
MESSAGES = [
    {"role": "assistant", "content": 'I ask <tool_call>{"name": "add"}</tool_call>'},
    {"role": "tool", "content": "42 \x1b[2J"},
    {"role": "assistant", "content": "so 42"},
]


def row(step: int, sample: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "step": step,
        "sample": sample,
        "prompt_id": sample // 2,
        "group_id": sample // 2,
        "source": "sums",
        "prompt": f"question {sample // 2}",
        "response": f"response {step}.{sample}",
        "expected": "42",
        "reward": sample / 4,
        "correct": sample > 1,
        "response_length": 10 * sample,
        "truncated": sample == 3,
        "reward/format": 0.5,
    }
    return {**fields, **changes}


def write_step(folder: RunFolder, step: int, **changes: Any) -> None:
    folder.training_samples.mkdir(exist_ok=True)
    file_of(folder, step).write_bytes(encoded([row(step, sample, **changes) for sample in range(4)]))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text("name: x\n")
    write_step(folder, 1)
    write_step(folder, 10, prompt_id=1, prompt="question 1", reward=0.25)
    return folder


def shown(*arguments: object) -> str:
    result = invoke("samples", *arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def responses(text: str) -> list[str]:
    return [line.split()[-1] for line in text.splitlines() if line.startswith("response ")]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--training"], ["10.0", "10.1", "10.2", "10.3"]),
        (["--training", "--step", 1, "--wrong"], ["1.0", "1.1"]),
        (["--training", "--step", 1, "--truncated"], ["1.3"]),
        (["--training", "--step", 1, "--sort", "-length", "--limit", 2], ["1.3", "1.2"]),
        (["--training", "--step", 1, "--search", "ESPONSE 1.2"], ["1.2"]),
        (["--training", "--step", 1, "--where", "reward >= 0.5", "--where", "truncated = false"], ["1.2"]),
    ],
)
def test_samples_of_a_step_are_chosen(run: RunFolder, options: list[object], found: list[str]) -> None:
    assert responses(shown(run.path, *options)) == found


def test_a_file_is_read_as_its_run_is(run: RunFolder) -> None:
    assert shown(file_of(run, 10)) == shown(run.path, "--training")


def test_a_conversation_shows_calls_and_answers_apart(run: RunFolder) -> None:
    write_step(run, 20, messages=json.dumps(MESSAGES), advantage=-0.5, logprob_mean=-1.25)
    text = shown(run.path, "--training", "--limit", 1)
    lines = [line.rstrip() for line in text.splitlines()]
    begin = lines.index("turn 1    I ask")
    assert lines[begin + 1 : begin + 4] == ['call      {"name": "add"}', "answer    42 \ufffd[2J", "turn 2    so 42"]
    assert "1 | reward 0 | format 0.5 | advantage -0.5 | 0 tokens | log-prob -1.25 | sums" in text
    assert "\x1b" not in text


def test_two_steps_are_compared_by_prompt(run: RunFolder) -> None:
    text = shown(run.path, "--training", "--diff", 1, 10)
    assert "1 | reward -0.375" in text  # of (0.5 + 0.75) / 2 to 0.25
    assert "step 1: mean reward 0.625 of 2" in text
    assert "step 10: mean reward 0.25 of 4" in text
    assert any("response 1.2" in line and "response 10.0" in line for line in text.splitlines())
    found = json.loads(shown(run.path, "--training", "--diff", 1, 10, "--json"))
    (pair,) = found["prompts"]
    assert (found["kind"], found["steps"], found["matching"], pair["change"]) == ("training", [1, 10], 1, -0.375)
    assert [len(pair[side]) for side in ("before", "after")] == [2, 4]


def test_json_has_every_column(run: RunFolder) -> None:
    write_step(run, 20, reward=float("nan"))
    found = json.loads(shown(run.path, "--training", "--limit", 1, "--json"))
    assert {name: found[name] for name in ("kind", "step", "matching")} == {
        "kind": "training",
        "step": 20,
        "matching": 4,
    }
    (sample,) = found["samples"]
    assert set(sample) == {*COLUMNS, "parts"}
    assert (sample["reward"], sample["parts"]) == (None, {"format": 0.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "7"], "no samples of step 7; steps with samples: 1, 10"),
        (["--diff", "1", "7"], "no samples of step 7; steps with samples: 1, 10"),
        (["--sort", "lenght"], "--sort: no column 'lenght'; did you mean"),
        (["--follow", "--step", "1"], "--follow: applies to new steps of a run, not to --step"),
    ],
)
def test_what_is_not_there_is_reported(run: RunFolder, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shown(run.path, "--training", *options)


def test_steps_without_a_common_prompt_are_refused(run: RunFolder) -> None:
    write_step(run, 20, prompt="another")
    with pytest.raises(UserError, match="steps 1 and 20 have no prompt in common"):
        shown(run.path, "--training", "--diff", 1, 20)


@pytest.mark.parametrize("content", [b"", b"PAR1 of something else PAR1"])
def test_a_damaged_file_is_one_line(run: RunFolder, content: bytes) -> None:
    file_of(run, 10).write_bytes(content)
    with pytest.raises(UserError, match=r"step-00000010.parquet: no file of samples \(ArrowInvalid\); give a run"):
        shown(run.path, "--training")


def test_a_run_without_any_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="no training samples yet; wait for the first step"):
        shown(tmp_path, "--training")


def test_new_steps_are_shown_until_the_run_ends(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a step that is taken again after a resume."""
    monkeypatch.setattr(status, "POLL_SECONDS", 0.0)
    looks = []

    def over() -> bool:
        looks.append(None)
        if len(looks) in (2, 3):
            write_step(run, 11, response=f"at look {len(looks)}")
            os.utime(file_of(run, 11), (len(looks), len(looks)))
        return len(looks) == 4

    monkeypatch.setattr(status, "run_over", lambda _: over)
    lines = shown(run.path, "--training", "--follow", "--json", "--limit", 1).splitlines()
    assert [(one["step"], one["samples"][0]["response"]) for one in map(json.loads, lines)] == [
        (10, "response 10.0"),
        (11, "at look 2"),
        (11, "at look 3"),
    ]


def test_without_pyarrow_one_line_says_so(run: RunFolder) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from rlhpc.cli.main import main; main()"
    command = [sys.executable, "-c", code, "samples", str(run.path), "--training"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rlhpc: pyarrow is not installed in ")
    assert len(done.stderr.splitlines()) == 1

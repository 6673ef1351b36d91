"""``rlhpc samples`` on training steps: what is shown, printed as JSON, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
        (["--training", "--step", 1, "--wrong", "--limit", 1], ["1.0"]),
        (["--training", "--step", 1, "--search", "ESPONSE 1.2"], ["1.2"]),
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


def test_a_step_without_samples_is_reported(run: RunFolder) -> None:
    with pytest.raises(UserError, match=r"training_samples: no samples of step 7; steps with samples: 1, 10"):
        shown(run.path, "--training", "--step", 7)


@pytest.mark.parametrize("content", [b"", b"PAR1 of something else PAR1"])
def test_a_damaged_file_is_one_line(run: RunFolder, content: bytes) -> None:
    file_of(run, 10).write_bytes(content)
    with pytest.raises(UserError, match=r"step-00000010.parquet: no file of samples \(ArrowInvalid\); give a run"):
        shown(run.path, "--training")


def test_a_run_without_any_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="no training samples yet; wait for the first step"):
        shown(tmp_path, "--training")


def test_without_pyarrow_one_line_says_so(run: RunFolder) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from rlhpc.cli.main import main; main()"
    command = [sys.executable, "-c", code, "samples", str(run.path), "--training"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rlhpc: pyarrow is not installed in ")
    assert len(done.stderr.splitlines()) == 1

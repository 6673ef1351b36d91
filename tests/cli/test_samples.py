"""``rlhpc samples``: which are shown, how, and what it does not need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from rlhpc.core.errors import UserError
from tests.cli.test_light import HEAVY, modules_after
from tests.helpers.commands import invoke


def record(step: int, response: str, reward: float, **changes: object) -> str:
    fields = {
        "step": step,
        "set": "",
        "source": "sums",
        "prompt": "1+2=",
        "response": response,
        "expected": "3",
        "reward": reward,
        "parts": {},
        "correct": reward >= 1,
        "truncated": False,
    }
    return json.dumps({**fields, **changes}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "samples.jsonl").write_text(
        record(0, "early", 0.0)
        + record(5, "right", 1.0, parts={"format": 0.25})
        + record(5, "[bold]wrong", 0.5, truncated=True)
        + record(5, "other", 0.0, source="products", set="hard")
        + '{"step": 5, "cut of'
    )
    return tmp_path


def shown(*arguments: object) -> str:
    result: Result = invoke("samples", *arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_response_cannot_take_over_the_terminal(tmp_path: Path):
    (tmp_path / "samples.jsonl").write_text(record(0, "\x1b]0;mine\x07 \x9b2J\r a\tb\nc", 0.0))
    text = shown(tmp_path / "samples.jsonl")
    assert "\ufffd]0;mine\ufffd \ufffd2J\ufffd a" in text
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(text)


def test_the_last_validation_is_shown_with_all_that_is_known(run: Path):
    text = shown(run)
    assert "early" not in text
    assert "1 | reward 1 | format 0.25 | sums" in text
    assert "2 | reward 0.5 | sums | truncated" in text
    assert "response  [bold]wrong" in text
    assert "3 | reward 0 | hard | products" in text
    assert f"3 of 3 samples of step 5: {run / 'samples.jsonl'}" in text.replace("\n", "")
    assert shown(run / "samples.jsonl") == text


def test_what_is_asked_for_is_shown(run: Path):
    assert "early" in shown(run, "--step", 0)
    wrong = shown(run, "--wrong")
    assert ("right" in wrong, "[bold]wrong" in wrong, "other" in wrong) == (False, True, True)
    for name in ("products", "hard"):
        assert "1 of 1 samples" in shown(run, "--source", name)
    assert "1 of 3 samples" in shown(run, "--limit", 1)


def test_a_sample_without_a_verdict_is_wrong_without_a_reward(run: Path):
    verdicts = ((0.0, None), (0.1, None), (1.0, False))
    (run / "samples.jsonl").write_text("".join(record(5, f"r{r}", r, correct=correct) for r, correct in verdicts))
    text = shown(run, "--wrong")
    assert ["r0.0" in text, "r0.1" in text, "r1.0" in text] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "7"], "no samples of step 7; steps with samples: 0, 5"),
        (["--source", "sum"], "--source: no data source or set 'sum'; did you mean 'sums'?"),
    ],
)
def test_what_is_not_there_is_reported(run: Path, options: list[str], message: str):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        shown(run, *options)


def test_a_file_of_something_else_is_refused(run: Path):
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:1: not a sample; give a run"):
        shown(run / "metrics.jsonl")


def test_a_run_without_samples_yet_is_reported(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="no samples yet; wait for the first validation"):
        shown(tmp_path)


def test_it_imports_nothing_heavy(run: Path):
    assert not modules_after("samples", str(run)) & {*HEAVY, "numpy", "pydantic", "submitit"}

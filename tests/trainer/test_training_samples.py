"""Samples of training steps on disk: which numbers and texts they have, which files stay, what a failure does."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Prompt, Sample
from rlhpc.config.data import DataSection
from rlhpc.config.observe import ObserveSection, TrainingSamplesSection
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.process import take_observing_seconds
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.observe import training_samples as files
from rlhpc.rollout.tool_calls import parse_calls
from rlhpc.trainer.training_samples import SampleRows, SampleTexts, TrainingSamples
from tests.helpers.responses import encode_response
from tests.rollout.tool_task import CALLS, make_tokenizer

MIB = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    inner = make_tokenizer()
    return Tokenizer(inner, (inner.eos_token_id,), DataSection())


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    folder = RunFolder(tmp_path / "run").create()
    folder.attempt(1).path.mkdir()
    return folder.attempt(1)


def prompt_of(number: int) -> Prompt:
    return Prompt(number, (), "sums", {"answer": 3, "odd": "\ud800"} if number else "3", {})


def sample_of(tokenizer: Tokenizer, text: str = "3", **changes: Any) -> Sample:
    (prompt,) = tokenizer.encode_prompts(["1+2="])
    response = encode_response(tokenizer, text)
    made = Sample(
        prompt_id=0,
        group_id=0,
        tokens=np.array([*prompt, *response], np.int32),
        prompt_len=len(prompt),
        log_probs=np.linspace(-1, -0.5, len(response), dtype=np.float32),
        reward=1.0,
        policy_version=4,
        truncated=False,
        reward_parts={"format": 0.25},
    )
    return replace(made, **changes)


def with_tool(tokenizer: Tokenizer) -> Sample:
    turn, last = (encode_response(tokenizer, text) for text in (CALLS[0], "42"))
    answers = tokenizer.tool_turn(["42", "7"])[1:]
    start = sample_of(tokenizer, prompt_id=1, group_id=1, reward=0.0, reward_parts={})
    response = [*turn, *answers, *last]
    mask = np.array([1] * len(turn) + [0] * len(answers) + [1] * len(last), bool)
    return replace(
        start,
        tokens=np.array([*start.tokens[: start.prompt_len], *response], np.int32),
        log_probs=np.where(mask, -0.25, 0.0).astype(np.float32),
        response_mask=mask,
        tool_tokens=len(answers),
        truncated=True,
    )


def rows_of(tokenizer: Tokenizer, *samples: Sample, old: bool = True, most: int = MIB) -> list[files.Row]:
    before = [one.log_probs + np.float32(0.125) for one in samples] if old else None
    advantages = [np.linspace(-1, 1, one.response_len, dtype=np.float32) for one in samples]
    return SampleRows(SampleTexts(tokenizer, prompt_of, parse_calls), 0.5, most).of(7, samples, advantages, before)


def writer_of(
    attempt: AttemptFolder, tokenizer: Tokenizer, section: TrainingSamplesSection | None, rank: int = 0, last: int = 0
) -> TrainingSamples:
    config: Any = SimpleNamespace(
        observe=ObserveSection(training_samples=section), validation=SimpleNamespace(success=0.5)
    )
    context: Any = SimpleNamespace(info=SimpleNamespace(rank=rank), run=attempt.run, attempt=attempt)
    return TrainingSamples(config, context, SampleTexts(tokenizer, prompt_of), last)


def take(writer: TrainingSamples, tokenizer: Tokenizer, *steps: int) -> None:
    sample = sample_of(tokenizer)
    for step in steps:
        writer.step(step, [sample], [sample.log_probs], None)
        writer.close()


def test_a_sample_is_read_back_with_its_numbers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(files.encoded(rows_of(tokenizer, sample_of(tokenizer))))
    (row,) = files.read_file(tmp_path / "file")
    assert set(row) == {*files.COLUMNS, "parts"}
    assert (row["step"], row["sample"], row["source"], row["expected"], row["response"]) == (7, 0, "sums", "3", "3")
    assert (row["reward"], row["parts"], row["correct"], row["truncated"]) == (1.0, {"format": 0.25}, True, False)
    assert (row["trained_tokens"], row["response_length"], row["tool_tokens"], row["turns"]) == (2, 2, 0, 1)
    assert (row["logprob_mean"], row["logprob_min"], row["logprob_diff_mean"]) == (-0.75, -1.0, 0.125)
    assert (row["advantage"], row["advantage_min"], row["advantage_max"]) == (0.0, -1.0, 1.0)
    assert (row["policy_version"], row["prompt_id"], row["group_id"]) == (4, 0, 0)


def test_a_conversation_keeps_its_calls_and_answers(tokenizer: Tokenizer) -> None:
    (row,) = rows_of(tokenizer, with_tool(tokenizer), old=False)
    assert json.loads(row["messages"]) == [
        {"role": "assistant", "content": CALLS[0]},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "42"},
    ]
    assert (row["turns"], row["tool_calls"], row["logprob_mean"]) == (2, 1, -0.25)
    assert row["trained_tokens"] == row["response_length"] > 0 < row["tool_tokens"]
    assert "logprob_diff_mean" not in row  # the trainer's log-probs are not known with a single update
    assert json.loads(row["expected"]) == {"answer": 3, "odd": "?"}


def test_a_masked_sample_has_no_numbers_of_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    sample = sample_of(tokenizer)
    masked = replace(sample, response_mask=np.zeros(sample.response_len, bool))
    (tmp_path / "file").write_bytes(files.encoded(rows_of(tokenizer, masked)))
    (row,) = files.read_file(tmp_path / "file")
    assert (row["trained_tokens"], row["logprob_mean"], row["advantage"]) == (0, None, None)
    assert row["turns"] == 1


def test_a_step_with_too_much_text_keeps_whole_groups(tokenizer: Tokenizer) -> None:
    groups = [sample_of(tokenizer, "33333", group_id=number) for number in (2, 0, 1, 0, 2, 1)]
    one = sum(len(value) for value in rows_of(tokenizer, groups[0])[0].values() if isinstance(value, str))
    rows = rows_of(tokenizer, *groups, most=3 * one)
    assert [(row["sample"], row["group_id"]) for row in rows] == [(1, 0), (3, 0)]
    assert len(rows_of(tokenizer, *groups, most=6 * one)) == 6


def test_the_oldest_files_go_but_the_first_stays(attempt: AttemptFolder) -> None:
    folder = attempt.run
    size = len(files.encoded([{"step": 1, "prompt": "a"}]))
    writer = files.SampleFiles(attempt, most_bytes=3 * size + size // 2)
    for step in range(1, 7):
        writer.write(step, [{"step": step, "prompt": "a"}])
        writer.close()
    assert files.kept_steps(folder) == [1, 5, 6]
    assert [row["step"] for row in files.read_file(files.file_of(folder, 5))] == [5]
    files.forget_steps(folder, 5)  # the checkpoint that a resumed run begins with
    assert files.kept_steps(folder) == [1, 5]


@pytest.mark.parametrize("every", [0, 1, 3])
def test_the_first_and_every_nth_step_are_kept(attempt: AttemptFolder, tokenizer: Tokenizer, every: int) -> None:
    take(writer_of(attempt, tokenizer, TrainingSamplesSection(every=every)), tokenizer, *range(1, 8))
    assert files.kept_steps(attempt.run) == {0: [], 1: [*range(1, 8)], 3: [1, 3, 6]}[every]
    writer_of(attempt, tokenizer, None, last=3)  # resumed, with samples turned off
    assert all(step <= 3 for step in files.kept_steps(attempt.run))


def test_the_thread_that_writes_counts_as_an_observer(attempt: AttemptFolder, tokenizer: Tokenizer) -> None:
    writer = writer_of(attempt, tokenizer, TrainingSamplesSection(every=1))
    take_observing_seconds()
    take(writer, tokenizer, 1)
    assert 0 < take_observing_seconds() < 10


def test_other_ranks_and_ranks_of_an_ended_attempt_write_nothing(attempt: AttemptFolder, tokenizer: Tokenizer) -> None:
    section = TrainingSamplesSection(every=1)
    take(writer_of(attempt, tokenizer, section, rank=1), tokenizer, 1)
    assert not attempt.run.training_samples.exists()
    first = writer_of(attempt, tokenizer, section)
    attempt.run.attempt(2).path.mkdir()
    take(first, tokenizer, 1)
    assert files.kept_steps(attempt.run) == []


def test_a_failure_is_reported_once_and_ends_nothing(
    attempt: AttemptFolder, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt.run.training_samples.write_text("a file in its place")
    take(writer_of(attempt, tokenizer, TrainingSamplesSection(every=1)), tokenizer, 1, 2)
    errors = capsys.readouterr().err
    assert errors.count("continuing without samples of training steps, which failed: ") == 1


def test_a_file_that_cannot_be_written_is_reported_once(
    attempt: AttemptFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = files.SampleFiles(attempt, MIB)
    attempt.run.training_samples.rmdir()
    for step in (1, 2):
        writer.write(step, [{"step": step}])
        writer.close()
    errors = capsys.readouterr().err
    assert errors.count("continuing without samples of training steps, which failed: FileNotFoundError") == 1
    assert "Traceback" not in errors


def test_a_step_does_not_wait_for_the_file_of_another(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = threading.Event()
    writer = files.SampleFiles(attempt, MIB)
    encode = files.encoded

    def slow(rows: Any) -> bytes:
        assert allowed.wait(60)
        return encode(rows)

    monkeypatch.setattr(files, "encoded", slow)
    for step in (1, 2, 3):
        writer.write(step, [{"step": step}])
    allowed.set()
    writer.close()
    assert files.kept_steps(attempt.run) == [1]
    assert [record.message for record in caplog.records] == [
        "samples of step 2 are left out: those of an earlier step are still being written"
    ]

"""The demo's inputs: complete, made once, with nothing held out in the training files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet

from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.data.arithmetic import add_without_carrying, make, split_problems
from rlhpc.models import read_model


def problem(text: str) -> tuple[int, ...]:
    """Order of the operands aside."""
    return tuple(sorted(map(int, text.rstrip("=").split("+"))))


@pytest.mark.heavy
def test_held_out_problems_are_in_no_training_file(demo_folder: Path):
    train = {
        problem(row[0]["content"]) for row in parquet.read_table(demo_folder / "train.parquet")["prompt"].to_pylist()
    }
    sft = {
        problem(json.loads(line)["messages"][0]["content"])
        for line in (demo_folder / "sft.jsonl").read_text().splitlines()
    }
    held_out = [
        problem(json.loads(line)["prompt"][0]["content"])
        for line in (demo_folder / "validation.jsonl").read_text().splitlines()
    ]
    assert len(set(held_out)) == len(held_out) == 256
    assert not set(held_out) & (train | sft)
    assert len(train) > 3000


def test_ground_truths_are_sums(demo_folder: Path):
    for row in parquet.read_table(demo_folder / "train.parquet").to_pylist()[:500]:
        assert sum(problem(row["prompt"][0]["content"])) == int(row["reward_model"]["ground_truth"])


def test_demonstrations_forget_to_carry_as_often_as_asked(demo_folder: Path):
    right = sloppy = 0
    for line in (demo_folder / "sft.jsonl").read_text().splitlines():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        a, b = problem(question)
        if add_without_carrying(a, b) != a + b:
            right += int(answer) == a + b
            sloppy += int(answer) == add_without_carrying(a, b)
    assert 0.57 < sloppy / (right + sloppy) < 0.63
    assert right + sloppy > 5000


def test_forgetting_to_carry():
    assert [add_without_carrying(a, b) for a, b in ((47, 38), (12, 34), (60, 72), (99, 99))] == [75, 46, 32, 88]


def test_the_model_folder_is_one_that_a_run_accepts(demo_folder: Path):
    shape = read_model(demo_folder / "model")
    assert (shape.num_layers, shape.hidden_size, shape.num_kv_heads, shape.vocab_size) == (2, 128, 2, 16)
    assert (demo_folder / "model" / "model.safetensors").is_file()


def test_a_second_call_changes_nothing(demo_folder: Path):
    before = {path: path.stat().st_mtime_ns for path in demo_folder.rglob("*")}
    make(str(demo_folder), seed=3)
    assert {path: path.stat().st_mtime_ns for path in demo_folder.rglob("*")} == before
    assert [path.name for path in demo_folder.parent.iterdir()] == [demo_folder.name]


def test_other_arguments_for_a_folder_that_is_there_are_refused(demo_folder: Path):
    with pytest.raises(
        UserError, match=r"prepare.arguments: seed is 4, but .* was created with 3; name another folder"
    ):
        make(str(demo_folder), seed=4)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="was not created by this function; name another folder"):
        make(str(tmp_path))
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(ValueError, match="larger than population"):
        make(str(tmp_path / "inputs"), validation=10**6)
    assert os.listdir(tmp_path) == []


def test_of_several_that_make_the_folder_one_is_first(demo_folder: Path, tmp_path: Path, monkeypatch):
    def write_after_another(file: Path, value: object) -> None:
        shutil.copytree(demo_folder, tmp_path / "inputs")
        write_json(file, value)

    monkeypatch.setattr("rlhpc.data.arithmetic.write_json", write_after_another)
    make(str(tmp_path / "inputs"), seed=3)
    assert os.listdir(tmp_path) == ["inputs"]
    assert (tmp_path / "inputs" / "train.parquet").is_file()


def test_the_split_depends_on_the_seed_alone():
    assert split_problems(1, 50) == split_problems(1, 50)
    assert split_problems(1, 50)[1] != split_problems(2, 50)[1]
    assert all(problems != sorted(problems) for problems in split_problems(1, 50))

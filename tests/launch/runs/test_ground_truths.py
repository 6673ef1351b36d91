"""Ground truths that no response can equal are refused before a job waits in the queue."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.preflight import check_ground_truths
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs


def rows(*truths: Any) -> list[dict[str, Any]]:
    return [{"data_source": "sums", "prompt": "1+1=", "reward_model": {"ground_truth": truth}} for truth in truths]


def write(path: Path, *truths: Any) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows(*truths)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(*truths)))
    return path


def config(train: Path, *held_out: Path, function: str = "rlhpc.rewards.rules:maths", **sections: Any) -> RunConfig:
    given = {"train": [str(train)], "validation": [str(path) for path in held_out], **sections.pop("data", {})}
    known = {"name": "x", "model": {"path": "m"}, "train": {"steps": 1}, "data": given}
    return RunConfig.model_validate({**known, "rewards": [{"function": function}], **sections})


@pytest.mark.parametrize(("name", "place"), [("a.jsonl", "a.jsonl:3"), ("a.parquet", "a.parquet: row 3")])
def test_the_line_and_the_value_are_named(tmp_path: Path, name: str, place: str) -> None:
    train = write(tmp_path / name, "1", "2", " ", "")
    with pytest.raises(UserError) as error:
        list(check_ground_truths([config(train)]))
    what = "the ground truth ' ' is not one for rlhpc.rewards.rules:maths: it is empty"
    remedy = "correct or remove the row, or set reward_workers.on_failure"
    assert str(error.value) == f"{tmp_path / place}: {what}; {remedy}"


def test_what_the_run_does_not_use_is_not_checked(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.jsonl", "1", None), write(tmp_path / "bad.jsonl", "1", "2", "")
    assert not list(check_ground_truths([config(good)]))
    assert not list(check_ground_truths([config(bad, data={"filter": "my_module:keep"})])), "it may exclude the row"
    assert not list(check_ground_truths([config(bad, function="my_module:score")])), "it is not called here"
    assert not list(check_ground_truths([config(bad, function="rlhpc.rewards.rules:boxed")])), "any text is one"
    assert not list(check_ground_truths([config(tmp_path / "absent.jsonl")]))
    assert not list(check_ground_truths([config(good, bad, validation={"max_prompts": 2})]))
    with pytest.raises(UserError, match=r"bad\.jsonl:3"):
        list(check_ground_truths([config(good, bad, validation={"max_prompts": 3})]))


def test_where_such_rows_do_not_end_the_run_they_are_a_warning(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", "1", "x", "y")
    number = "rlhpc.rewards.rules:number"
    seeds = [config(train, function=number, reward_workers={"on_failure": "zero"}, seed=seed) for seed in range(3)]
    (warning,) = check_ground_truths(seeds)  # runs of an array, with the same files
    assert warning.endswith(
        "a.jsonl:2: the ground truth 'x' is not one for rlhpc.rewards.rules:number: it is not an integer; "
        "others are not shown"
    )


def test_programs_need_tests(tmp_path: Path) -> None:
    code = "rlhpc.rewards.code:python"
    train = write(tmp_path / "a.jsonl", "assert f(1) == 2", '{"inputs": ["1"], "outputs": ["1", "2"]}')
    with pytest.raises(UserError, match=r"a\.jsonl:2: .*has no tests in a known form"):
        list(check_ground_truths([config(train, function=code)]))
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*recursion"):
        list(check_ground_truths([config(write(tmp_path / "a.jsonl", "[" * 100_000), function=code)]))


def test_it_ends_in_time(tmp_path: Path) -> None:
    """A login node is shared; and 100,000 rows take a second."""
    train = write(tmp_path / "a.jsonl", *range(5000), "")
    began = time.monotonic()
    assert not list(check_ground_truths([config(train)], seconds=0.0))
    assert time.monotonic() - began < 5
    with pytest.raises(UserError, match=r"a\.jsonl:5001"):
        list(check_ground_truths([config(train)]))


def test_commands_refuse_it_in_one_line(tmp_path: Path) -> None:
    path = write_inputs(tmp_path)
    file = load_config(path).data.train[0].path
    write(file.with_suffix(".jsonl"), "1", "")
    change = [
        "resources.ranks_per_node=1",
        f"data.train=[{file.with_suffix('.jsonl')}]",
        "rewards=[{function: 'rlhpc.rewards.rules:maths'}]",
    ]
    for command in (["run", str(path), *change, "--check"], ["submit", str(path), *change, "--dry-run"]):
        done = invoke(*command)
        assert isinstance(done.exception, UserError), done.output
        assert "the ground truth '' is not one for" in str(done.exception)

"""What is wrong with a run is one line that names it, exit code 2, no traceback, whichever rank finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import complete, records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


def raises_on_zero(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return 1.0 / (len(solution_str) - len(solution_str))


def nan_when_long(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return float("nan") if len(solution_str) > 1 else 0.0


def _one_line(result: tuple[int, str]) -> str:
    """The error, checked for its form; progress lines come before it."""
    code, output = result
    assert code == 2, output
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("rlhpc: ")]
    assert len(errors) == 1, output
    return errors[0]


def _config(folder: Path, **changes: Any) -> Path:
    defaults = {"resources__ranks_per_node": 2, "sft": None, "train__steps": 2, "data__validation": []}
    return write_config(folder, **{**defaults, **changes})


def test_an_unreadable_ground_truth_is_found_before_the_first_step(tmp_path: Path) -> None:
    """In the last row, which two steps of 16 prompts would not reach."""
    config = _config(tmp_path, rewards__0__function="rlhpc.rewards.rules:maths")
    row = {"data_source": "sums", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    last = {**row, "reward_model": {"ground_truth": "\\boxed{"}}
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in [*[row] * 200, last]))
    line = _one_line(run(config, f"data.train=[{data}]"))
    what = "the ground truth '\\\\boxed{' is not one for rlhpc.rewards.rules:maths: math-verify cannot read it"
    assert f"{data}:201: {what}; correct or remove the row" in line
    assert records(tmp_path / "run") == []


@pytest.mark.long  # always: the one of NaN, and tests/rewards/test_reward_workers.py
def test_a_reward_that_raises_names_function_sample_and_error(tmp_path: Path) -> None:
    function = "tests.trainer.test_bad_input:raises_on_zero"
    line = _one_line(run(_config(tmp_path, rewards__0__function=function)))
    assert f"rewards.0.function {function}: raised ZeroDivisionError" in line
    assert "for prompt " in line


def test_a_reward_of_nan_names_function_and_sample(tmp_path: Path) -> None:
    function = "tests.trainer.test_bad_input:nan_when_long"
    line = _one_line(run(_config(tmp_path, rewards__0__function=function)))
    assert f"rewards.0.function {function}: returned nan for prompt " in line


def test_a_late_failure_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    """The third step's reward fails; the two steps before it can be resumed once the function is fixed."""
    config = _config(
        tmp_path, checkpoint__every=1, rewards__0__function="tests.trainer.test_bad_input:fails_at_third_step"
    )
    counter = tmp_path / "calls"
    code, output = run(config, "train.steps=4", f"rewards.0.arguments={{counter: {counter}, limit: 128}}")
    assert code == 2, output
    done = [record["step"] for record in records(tmp_path / "run")]
    assert done == [1, 2]
    complete(config, "train.steps=4", "--resume", "rewards.0.function=rlhpc.rewards.rules:number")
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]


def fails_at_third_step(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    counter: str,
    limit: int,
) -> float:
    """Raise after ``limit`` calls in all: with 64 samples a step, in the third one."""
    with open(counter, "a") as file:
        file.write("x")
        file.flush()
        if file.tell() > limit:
            raise RuntimeError("out of luck")
    return float(len(solution_str))


def test_an_overlong_prompt_names_file_and_row(tmp_path: Path) -> None:
    config = _config(tmp_path, data__max_prompt_tokens=6, rollout__max_response_tokens=4)
    line = _one_line(run(config))
    assert "train.parquet" in line
    assert "data.max_prompt_tokens is 6" in line


def test_a_tokenizer_larger_than_the_model_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert run(config, "train.steps=1")[0] == 0
    assert run(config, "--check")[0] == 0
    file = tmp_path / "inputs" / "model" / "tokenizer.json"
    document = json.loads(file.read_text())
    document["model"]["vocab"]["z"] = 99
    file.write_text(json.dumps(document))
    line = _one_line(run(config, "--check"))
    assert str(file) in line
    assert "vocab_size" in line
    assert "99" in line

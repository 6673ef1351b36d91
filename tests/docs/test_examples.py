"""The examples of the pages, as a user has them: files in the working folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhpc.algo import Responses, find_algorithm
from rlhpc.config.algorithm import AlgorithmSection, KLSection
from rlhpc.config.load import load_config
from rlhpc.config.rollout import ToolSection
from rlhpc.core.folder import RunFolder
from rlhpc.core.imports import import_attribute
from rlhpc.launch.runs.submit import make_plan
from rlhpc.observe.trackers.libraries import deliveries
from rlhpc.observe.training_samples import encoded, file_of
from rlhpc.rewards.calls import KEYWORDS, Entry, Score, load_function
from rlhpc.rollout.tool_calls import Failure, MethodCall, ToolAnswer, ToolCall, load_class, load_tool, parse_calls
from rlhpc.rollout.tool_kinds import find_tools, tool_schemas
from tests.data.test_groups import make_sample
from tests.docs.pages import DOCS, ROOT, blocks
from tests.helpers.runs import write_config
from tests.observe.trackers.steps import append, new_run, record, steps


@pytest.fixture(autouse=True)
def working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS / "examples")
    monkeypatch.syspath_prepend(DOCS / "examples")
    for module in ("my_reward", "my_algorithm", "my_family", "my_step", "my_tool", "my_notebook", "my_tracker"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_the_reward_gives_part_of_it_for_the_last_digit() -> None:
    def scores(arguments: dict[str, float], *responses: str) -> list[object]:
        score = load_function(Entry("my_reward:score", arguments, "rewards.0.function"))
        prompt = {**dict.fromkeys(KEYWORDS), "ground_truth": "42"}
        return [score({**prompt, "solution_str": response}) for response in responses]

    assert scores({"last_digit": 0.2}, "= 42", "32", "24", "none") == [Score(v) for v in (1.0, 0.2, 0.0, 0.0)]
    assert scores({}, "32") == [Score(0.0)]


def test_the_algorithms_advantages_leave_one_out() -> None:
    """The numbers that verl 0.9.1 computes."""
    section = AlgorithmSection(name="my_algorithm:RLOO")
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64), torch.tensor([7, 7, 3, 3])
    responses = Responses.of(rewards, groups, lengths=torch.tensor([1, 2, 1, 1]))
    advantages = find_algorithm(section).advantage(responses, section).advantages
    assert advantages.tolist() == [1.0, -1.0, -1.0, 0.5, -0.5]
    alone = Responses.of(rewards, torch.tensor([7, 7, 7, 3]), lengths=torch.ones(4, dtype=torch.int64))
    assert find_algorithm(section).advantage(alone, section).advantages.tolist() == [0.5, -1.0, 0.5, 0.0]


def test_the_algorithms_gradient_is_that_of_reinforce() -> None:
    section = AlgorithmSection(name="my_algorithm:RLOO", kl=KLSection(coefficient=0.0))
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens = {
        "log_probs": log_probs,
        "entropy": torch.ones(3),
        "advantages": torch.tensor([2.0, -1.0, 5.0]),
        "weight": torch.tensor([1.0, 0.5, 0.0]),
    }
    sums = find_algorithm(section).loss(tokens, section)
    sums["loss"].backward()
    assert log_probs.grad.tolist() == [-2.0, 0.5, 0.0]
    assert float(sums["entropy"]) == 1.5


def test_the_tool_answers_the_pages_call() -> None:
    section = ToolSection(name="calculate", function="my_tool:calculate", arguments={"digits": 3})
    (schema,) = tool_schemas([section])
    assert list(schema["function"]["parameters"]["properties"]) == ["numbers", "operation"]
    (call,) = [call for text in blocks(DOCS / "tools.md", "") for call in parse_calls(text)]
    assert isinstance(call, ToolCall)
    ask = load_tool(find_tools([section])[0].entry(100))
    assert ask(call.arguments) == ToolAnswer("42.000")
    assert ask({**call.arguments, "operation": "multiply"}) == ToolAnswer("360.000")


def test_the_tracker_takes_each_step_once(tmp_path: Path) -> None:
    shown = (yaml.safe_load(text)["observe"] for text in blocks(DOCS / "watch.md", "yaml"))
    (entry,) = next(section["trackers"] for section in shown if "trackers" in section)[2:]
    folder = new_run(tmp_path)
    config = load_config(write_config(tmp_path, observe__trackers=[entry]))
    append(folder, steps(1, 2))
    for _ in range(2):
        (delivery,) = deliveries(folder, config, ["own"])
        delivery.deliver()
        append(folder, [record("rl", 3, **{"reward/mean": 0.5})])
    delivery.deliver()
    rows = (folder.trackers.path / "own.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows] == [["sft", "1"], ["rl", "0"], ["rl", "1"], ["rl", "2"], ["rl", "3"]]
    assert rows[-1].endswith(",0.5")


def test_the_query_of_samples_finds_short_ones_and_compares_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "runs" / "my-run")
    folder.training_samples.mkdir(parents=True)
    for step in (1, 10):
        rows = [{"step": step, "prompt_id": 7, "reward": step / 20, "response_length": 60 * n} for n in range(3)]
        file_of(folder, step).write_bytes(encoded(rows))
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec("".join(blocks(DOCS / "evaluation.md", "python")), found)
    assert [(row["step"], row["response_length"]) for row in found["longest"]] == [(1, 60), (1, 0)]
    means = {row["step"]: row["reward_mean"] for row in found["steps"].to_pylist()}
    assert means == pytest.approx({1: 0.05, 10: 0.5})


def test_each_conversation_has_a_notebook() -> None:
    section = ToolSection(name="write_note", function="my_notebook:Notebook.write", arguments={"most_lines": 2})
    entry = find_tools([section])[0].entry(100)
    ask, rebuilt = load_class(entry), load_class(entry)
    write = {"method": "write", "past": (), "extra_info": {}}
    assert ask(MethodCall(1, given={"line": "a"}, **write)) == ToolAnswer("line 1")
    assert ask(MethodCall(1, given={"line": "b"}, **write)) == ToolAnswer("line 2")
    assert ask(MethodCall(1, given={"line": "c"}, **write)) == Failure(
        "raised", "raised ValueError: the notebook is full"
    )
    assert ask(MethodCall(2, given={"line": "c"}, **write)) == ToolAnswer("line 1")
    past = (("write", {"line": "a"}), ("write", {"line": "b"}))
    assert rebuilt(MethodCall(1, "read", {}, past, {})) == ToolAnswer("a\nb"), "a lost object is rebuilt"


def test_the_step_masks_all_but_correct_responses() -> None:
    masked = import_attribute("my_step:masked", where="train.step")
    right, wrong = make_sample(reward=1.0), make_sample(reward=0.9)
    assert masked(right) is right
    assert (wrong.trained_len, masked(wrong).trained_len) == (2, 0)


def test_the_slurm_example_makes_a_job(tmp_path: Path) -> None:
    plan = make_plan([load_config(ROOT / "configs" / "slurm_demo.yaml")], tmp_path)
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2"} <= set(plan.script.splitlines())
    assert "gpus" not in plan.script

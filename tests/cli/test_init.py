"""``rlhpc init``: what it writes passes the checks and the planner for every answer; it overwrites nothing."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.plan_run import prediction
from rlhpc.cli.setup import OFFERED
from rlhpc.cli.starter import ALGORITHMS, REWARDS, Answers, merged, starting_text, starting_tree
from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.run import check_config
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs/ready/models/Qwen2.5-0.5B-Instruct"
SECONDS = 30.0


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model and prompts."""
    write_inputs(tmp_path, max_position_embeddings=4096)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: object) -> str:
    result = invoke("init", *arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.heavy
@pytest.mark.parametrize("nodes", [1, 12])
@pytest.mark.parametrize("reward", ["maths", "rlhpc.rewards.formats:think_answer"])
@pytest.mark.parametrize("algorithm", OFFERED)
def test_every_answer_makes_a_run_that_can_be_checked_and_planned(
    algorithm: str, reward: str, nodes: int, inputs: Path
) -> None:
    options = ["--model", "model", "--data", "train.jsonl", "--algorithm", algorithm, "--reward", reward]
    validation = ["--validation", "train.jsonl"] if nodes == 1 else []
    init("x.yaml", *options, *validation, "--nodes", nodes)
    config = load_config(inputs / "x.yaml")
    assert (config.algorithm.name, config.slurm.nodes, config.name) == (algorithm, nodes, "x")
    assert config.rewards[0].function == REWARDS.get(reward, reward)
    assert check_config(config, prepared=True, starting=False)
    lines, fits = prediction(config, "h100", as_json=False)
    assert fits, lines


@pytest.mark.heavy
def test_a_named_gpu_gets_the_layout_that_the_planner_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init("x.yaml", "--model", MODEL, "--data", "train.jsonl", "--gpu", "h100", "--gpus", 2)
    config = load_config(tmp_path / "x.yaml")
    found = invoke("plan", "search", "x.yaml", "--json", catch_exceptions=False)
    (best, *_) = yaml12.parse(found.stdout, "")
    assert config.actor.parallel.pp == best["layout"]["pp"]
    assert not {"actor", "reference", "rollout", "train"} & best.keys(), "the search would change nothing"
    assert prediction(config, None, as_json=False)[1]


def test_a_model_that_fits_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no engine size leaves room for a whole sequence"):
        init("--model", MODEL.parent / "Qwen2.5-72B", "--data", "t.jsonl", "--gpu", "h100", "--gpus", 1)
    assert not (tmp_path / "my.yaml").exists()


def test_nothing_is_overwritten(inputs: Path) -> None:
    before = (inputs / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"config.yaml: exists; name another file"):
        init("config.yaml", "--model", "model", "--data", "train.jsonl")
    assert (inputs / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model: is not given; add --model, or answer in a terminal"),
        (["--model", "m"], "--data: is not given"),
        (["--model", "m", "--data", "d", "--reward", "math"], "no built-in reward 'math'; did you mean 'maths'"),
        (["--model", "m", "--data", "d", "--name", "a/b"], "name: 'a/b' is not allowed"),
    ],
)
def test_a_wrong_answer_is_refused(options: list[str], message: str, inputs: Path) -> None:
    with pytest.raises(UserError, match=message):
        init("new.yaml", *options)
    assert not (inputs / "new.yaml").exists()


ODD = [
    "yes",
    "12",
    "1e-6",
    "a: b",
    "a #b",
    "[x]",
    "~",
    "it's",
    '"',
    "a, b",
    "",
    " x",
    "-",
    "é",
    "null",
    "{a: 1}",
    "*a",
    "x\ny",
]


@pytest.mark.parametrize("text", ODD)
def test_odd_texts_are_read_back(text: str) -> None:
    answers = Answers("x", text, (text, "b"), (), "grpo", "maths", 1, 8, None, 5)
    tree = starting_tree(answers)
    found = yaml12.parse(starting_text(tree, "s", "f", "t"), "")
    assert (found["model"]["path"], found["data"]["train"]) == (text, [text, "b"])
    assert found == {key: value for key, value in tree.items() if value != {}}


def test_a_layout_is_laid_over_the_answers() -> None:
    tree: dict[str, Any] = {"actor": {"parallel": {"tp": 1}, "optimizer": {"a": 1}}, "train": {"steps": 1}}
    found = merged(tree, {"actor": {"parallel": {"tp": 2, "pp": 2}}, "reference": {"memory": {}}})
    assert found["actor"] == {"parallel": {"tp": 2, "pp": 2}, "optimizer": {"a": 1}}
    assert (found["train"], found["reference"]) == ({"steps": 1}, {"memory": {}})
    assert tree["actor"]["parallel"] == {"tp": 1}


def test_algorithms_are_those_that_have_a_shipped_configuration() -> None:
    shipped = {file.stem for file in (ROOT / "configs" / "algorithms").glob("*.yaml")}
    assert set(OFFERED) == set(ALGORITHMS) == shipped


def test_a_terminal_is_asked(inputs: Path) -> None:
    """What an option answers is not asked; a wrong answer is asked for again."""
    child, terminal = pty.fork()
    if child == 0:
        code = "from rlhpc.cli.main import main; main()"
        os.execv(sys.executable, [sys.executable, "-c", code, "init", "--reward", "exact", "--nodes", "1"])
    dialogue = [
        ("Model", "model"),
        ("Training prompts", "train.jsonl train.jsonl"),
        ("Held-out prompts", ""),
        ("Algorithm", "grop"),
        ("Algorithm", "rloo"),
        ("GPUs per node", "2"),
        ("GPU, such as", ""),
    ]
    text = b""
    try:
        for question, reply in dialogue:
            text = _read_until(terminal, f"{question}".encode())
            _read_until(terminal, b": ")
            os.write(terminal, f"{reply}\r".encode())
        text = _read_until(terminal, b"next: rlhpc run my.yaml --check")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)
    config = load_config(inputs / "my.yaml")
    assert (config.algorithm.name, config.resources.ranks_per_node, len(config.data.train)) == ("rloo", 2, 2)
    assert config.rewards[0].function == REWARDS["exact"]
    assert b"Reward" not in text


def _read_until(terminal: int, end: bytes) -> bytes:
    text, deadline = b"", time.monotonic() + SECONDS
    while end not in text:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], text
        text += os.read(terminal, 1)
    return text

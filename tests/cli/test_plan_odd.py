"""``rlhpc plan`` on odd input: one line that names key, value and remedy, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from tests.helpers.commands import invoke

ROOT = Path(__file__).parents[2]
READY = str(ROOT / "configs" / "ready" / "qwen2-7b-8gpus.yaml")
MODEL = ROOT / "configs" / "ready" / "models" / "Qwen2-7B-Instruct" / "config.json"


def error_line(*arguments: str, command: str = "run") -> str:
    """The line that ``rlhpc plan`` prints before it exits with 2."""
    done = invoke("plan", command, READY, *arguments)
    assert isinstance(done.exception, UserError), done.output
    assert done.exception.remedy
    line = str(done.exception)
    assert "\n" not in line
    assert not done.output
    return line


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("resources.ranks_per_node=-1",), "resources.ranks_per_node: -1 is not allowed"),
        (("resources.ranks_per_node=1",), "actor.parallel: tp 2 x cp 1 x pp 2 = 4 ranks does not divide the 1 ranks"),
        (("resources.ranks_per_node=3",), "actor.parallel: tp 2 x cp 1 x pp 2 = 4 ranks does not divide the 3 ranks"),
        (("actor.parallel.tp=3",), "actor.parallel: tp 3 x cp 1 x pp 2 = 6 ranks does not divide the 8 ranks"),
        (("slurm=null",), "slurm: None is not allowed"),
        (("slurm.nodes=[4,2]",), "slurm.nodes: (4, 2): invalid range: minimum exceeds maximum; write [minimum, max"),
        (("search", "slurm.nodes=[4,2]"), "slurm.nodes: (4, 2): invalid range: minimum exceeds maximum"),
        (("slurm.nodes=100000",), "train.prompts_per_step: 5120 samples a step"),
        (("train.minibatches=7",), "train.minibatches: 5120 samples a step do not divide into 7 minibatches"),
        (("rollout.max_response_tokens=10000000",), "rollout.max_response_tokens: 10000000 response tokens after"),
        (("planning.response_tokens=9999",), "planning.response_tokens: a mean of 9999 is above rollout.max_response_"),
        (
            ("search", "planning.prompt_tokens=9999"),
            "planning.prompt_tokens: a mean of 9999 is above data.max_prompt",
        ),
        (("planning.response_tokens=abc",), "planning.response_tokens: 'abc' is not allowed"),
        (("planning.response_spread=1e6",), "planning.response_spread: 1000000.0 is not allowed"),
        (("site.efficiency.compute=1e-300",), "site.efficiency.compute: 1e-300 is not allowed"),
        (("site.efficiency.launch_us=1e300",), "site.efficiency.launch_us: 1e+300 is not allowed"),
        (("site.disk.write_gbps=0",), "site.disk.write_gbps: 0 is not allowed"),
        (
            ("actor.memory.recompute=full", "actor.memory.recompute_layers=5"),
            "actor.memory.recompute_layers: groups of 5 layers do not",
        ),
        (("search", "--gpus", ""), "--gpus: '': invalid list; write it as 8,16,32"),
        (("search", "--gpus", "8,0"), "--gpus: '8,0': invalid list; write it as 8,16,32"),
        (("search", "--gpus", "99999999999"), "--gpus: '99999999999': invalid list"),
        (("--gpu", ""), "--gpu: no GPU '' is known"),
        (("rewards=[{model: /nowhere}]",), "rewards.0.model: no config.json in '/nowhere'; correct the path"),
        (("search", "rewards=[{model: /nowhere}]"), "rewards.0.model: no config.json in '/nowhere'"),
        (("algorithm.name=ppo", "critic.path=/nowhere"), "critic.path: no config.json in '/nowhere'"),
        (("search", "algorithm.name=ppo", "critic.path=/nowhere"), "critic.path: no config.json in '/nowhere'"),
        (
            ("algorithm.name=ppo", "critic.parallel={tp: 3}"),
            "critic.parallel: the critic: tp 3 x cp 1 x pp 1 = 3 ranks",
        ),
        (("model.path=/nowhere",), "model.path: no such folder '/nowhere'"),
    ],
)
def test_odd_values_are_one_line(arguments: tuple[str, ...], line: str) -> None:
    command, *others = arguments if arguments[0] == "search" else ("run", *arguments)
    assert line in error_line(*others, command=command)


def test_a_folder_without_records_calibrates_nothing(tmp_path: Path) -> None:
    line = f"{tmp_path}/metrics.jsonl: no finished RL step; name the folder of a run with RL steps"
    assert error_line(str(tmp_path), command="calibrate") == line
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    assert error_line(str(tmp_path), command="calibrate") == line
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    error = invoke("plan", "calibrate", READY, str(tmp_path)).exception  # which `rlhpc` reports in one line
    assert isinstance(error, IsADirectoryError)
    assert error.filename == f"{tmp_path}/metrics.jsonl"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "abc"),
        ("hidden_size", 0),
        ("num_hidden_layers", -3),
        ("num_hidden_layers", 1.5),
        ("num_key_value_heads", 0),
        ("num_attention_heads", True),
        ("vocab_size", 1e30),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", "x"),
        ("rope_theta", -1),
    ],
)
def test_a_models_field_that_is_no_number_is_reported(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(MODEL.read_text()), field: value}))
    assert f"config.json: {field} = {value!r} is not a" in error_line(f"model.path={tmp_path}")


def test_a_model_without_its_config_is_reported(tmp_path: Path) -> None:
    assert "has no config.json; give a HuggingFace model folder" in error_line(f"model.path={tmp_path}")
    for text, line in (("[]", "is not a JSON object; restore the file"), ("{", "not a JSON document")):
        (tmp_path / "config.json").write_text(text)
        assert line in error_line(f"model.path={tmp_path}")


@pytest.mark.heavy
def test_one_gpu_and_very_many_prompts_are_planned() -> None:
    """As many as nobody asks for still take seconds: responses beyond some ten thousand of an engine are scaled."""
    one = ("resources.ranks_per_node=1", "actor.parallel.tp=1", "actor.parallel.pp=1", "rollout.tp=1")

    def rollout(*more: str) -> float:
        done = invoke("plan", "run", READY, *one, *more, "--json", catch_exceptions=False)
        return float(json.loads(done.stdout)["time"]["phases"]["rollout"]["seconds"])

    assert rollout("train.prompts_per_step=100000000") == pytest.approx(
        10000 * rollout("train.prompts_per_step=10000"), rel=0.02
    )

"""What a step may have, on the FSDP2 back end: critic, reference, reward model, tools, dynamic sampling, validation,
profile, and an update that is skipped and replayed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.attempts import export_folder
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import repeatable
from tests.convert.helpers import tensors_of
from tests.helpers.commands import rlhpc
from tests.helpers.runs import complete, records
from tests.rollout.tool_task import make_task
from tests.trainer.fsdp.inputs import config, prepare, rl_steps
from tests.trainer.fsdp.without_megatron import run_without_megatron
from tests.trainer.test_evaluate import save_classifier
from tests.trainer.test_observed_run import trace_names
from tests.trainer.test_separate_parts import TOOLS, tool_inputs

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

PPO: dict[str, Any] = {"name": "ppo", "kl": {"coefficient": 0.05}}


def test_a_run_with_every_part(tmp_path: Path) -> None:
    """Of an architecture without a table, in processes without Megatron-core; the reward model is a Qwen2."""
    inputs, reward = tool_inputs(tmp_path, "olmo2"), tmp_path / "reward"
    reward.mkdir()
    save_classifier(make_task(tmp_path / "scored") / "model", reward)
    inputs["data"]["validation"] = inputs["data"]["train"]
    file = config(
        tmp_path,
        **inputs,
        train__steps=2,
        train__dynamic_sampling={"oversample": 2.0, "check_every": 2},
        algorithm=PPO,
        critic__optimizer={"learning_rate": 1e-3},
        rewards__1={"model": str(reward), "weight": 0.5, "own_tokenizer": False},
        rollout__tools=TOOLS,
        rollout__max_response_tokens=64,
        validation={"every": 1, "max_prompts": 4},
        profile={"steps": [2], "ranks": [1]},
        checkpoint={"every": 1, "keep": 1, "keep_best": "reward_mean", "export": "hf"},
    )
    run_without_megatron(file)
    steps = rl_steps(tmp_path)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["logprob_diff_max"] < 1e-4
        assert step["tools/calls"] > 0
        assert step["reward/model"] != 0
        assert step["critic/loss"] > 0
        assert step["sampling/kept_groups"] + step["sampling/carried_groups"] > 0
        assert "validation/reward_mean" in step
        assert step["skipped_updates"] == step["critic/skipped_updates"] == 0
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6), "the first step's policy is the reference"
    assert steps[1]["kl"] != pytest.approx(0.0, abs=1e-4)
    assert steps[0]["critic/value_mean"] != steps[1]["critic/value_mean"]
    folder = RunFolder(tmp_path / "run")
    names = trace_names(folder.profile(2) / "rank-00001.trace.json.gz")
    assert {"rlhpc:update", "rlhpc:rollout"} <= names
    saved = max(folder.checkpoints.glob("step-*"))
    assert {"actor", "critic"} <= {path.name for path in saved.iterdir()}
    exported, initial = tensors_of(export_folder(folder, 2)), tensors_of(tmp_path / "model")
    assert exported.keys() == initial.keys()
    assert not any(tensor.equal(initial[name]) for name, tensor in exported.items())


@pytest.mark.long
def test_numbers_are_those_of_megatron(tmp_path: Path) -> None:
    """PPO after a warm-up, with a reference model: metrics of the same run on either back end."""
    optimizer = {"learning_rate": 1e-3, "epsilon": 1e-4}  # Adam's first updates enlarge rounding with a smaller one
    models = {f"{name}__optimizer": optimizer for name in ("sft", "actor", "critic")}
    for backend in ("fsdp", "megatron"):
        folder = tmp_path / backend
        file = config(
            folder,
            # transformers does not train the input embedding of a padding token, which may be sampled here.
            prepare=prepare(folder, "qwen3", pad_token_id=None),
            algorithm=PPO,
            train__backend=backend,
            train__tokens_per_microbatch=128,
            **models,
        )
        complete(file)
    ours, theirs = ([repeatable(r) for r in records(tmp_path / name / "run")] for name in ("fsdp", "megatron"))
    assert len(ours) == len(theirs) > 4
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            expected = pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
            assert mine[name] == expected, name


@pytest.mark.long
def test_an_update_that_is_skipped_can_be_replayed(tmp_path: Path) -> None:
    """From weights in a checkpoint of the same run."""
    file = config(
        tmp_path,
        train__steps=2,
        train__max_skipped_updates=99,
        rewards=[{"function": "tests.trainer.test_separate_parts:huge"}],
        checkpoint__every=1,
    )
    complete(file)
    assert sum(record["skipped_updates"] for record in rl_steps(tmp_path)) > 0
    done = rlhpc("replay", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "advantages" in done.stdout, "what is not finite in the batch"
    (result,) = (tmp_path / "run").rglob("replay/replay.json")
    replayed = json.loads(result.read_text())
    assert replayed["grad_norm"]["replayed"] == replayed["grad_norm"]["recorded"]


TOKENS = 16 + 12  # of the runs' longest sequences
FIXED = 80
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + i for i in range(16)],
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}


def finish(folder: Path, kind: str, model: dict[str, Any], **changes: Any) -> None:
    """One RL step of a model and its reference."""
    known: dict[str, Any] = {
        "algorithm__kl__coefficient": 0.05,
        "prepare": prepare(folder, kind, **model),
        "sft": None,
        "train__steps": 1,
        "train__minibatches": 1,
        "checkpoint__export": "hf",
    }
    complete(config(folder, ranks=1, **{**known, **changes}))
    (step,) = rl_steps(folder)
    assert step["logprob_diff_max"] < 1e-4
    assert step["kl"] == pytest.approx(0.0, abs=1e-6), "the policy is the reference"


@pytest.mark.long
def test_a_run_beyond_the_original_length_of_longrope(tmp_path: Path) -> None:
    original = {"original_max_position_embeddings": TOKENS - 1, "rope_parameters": LONGROPE}
    finish(tmp_path, "phi3", original)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_run_with_fixed_dynamic_rope(tmp_path: Path, backend: str) -> None:
    finish(tmp_path, "llama", {"rope_parameters": DYNAMIC}, model__rope_tokens=FIXED, train__backend=backend)
    fields = json.loads((export_folder(RunFolder(tmp_path / "run"), 1) / "config.json").read_text())
    base = 10000.0 * (8 * FIXED / 64 - 7) ** (32 / 30)
    rope = fields["rope_parameters"]
    assert rope["rope_type"] == "default"
    assert math.isclose(rope["rope_theta"], base)
    assert fields["max_position_embeddings"] == FIXED

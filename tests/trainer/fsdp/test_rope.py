"""Whole runs of models whose RoPE depends on length: trainer, reference, engine and export take the run's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.attempts import export_folder
from rlhpc.core.folder import RunFolder
from tests.helpers.runs import complete
from tests.trainer.fsdp.inputs import config, prepare, rl_steps

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

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

"""A job on the FSDP2 back end neither imports nor needs Megatron-core. test_parts.py has the same with what else a step
may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core.attempts import export_folder, exported_steps
from rlhpc.core.folder import RunFolder
from tests.convert.helpers import tensors_of
from tests.trainer.fsdp.inputs import config, rl_steps
from tests.trainer.fsdp.without_megatron import run_without_megatron

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_a_run_and_its_resumption_do_not_need_megatron(tmp_path: Path, kind: str) -> None:
    """Warm-up, RL, a checkpoint and its export, twice."""
    file = config(tmp_path, kind, sft__steps=1, train__steps=1, checkpoint__export="hf")
    run_without_megatron(file)
    run_without_megatron(file, "--resume", "train.steps=2")
    assert [step["step"] for step in rl_steps(tmp_path)] == [1, 2]
    run = RunFolder(tmp_path / "run")
    assert exported_steps(run) == (2, 3)
    assert tensors_of(export_folder(run, 3)).keys() == tensors_of(tmp_path / "inputs" / "model").keys()

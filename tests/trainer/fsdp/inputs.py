"""Configs and inputs of whole runs on the FSDP2 back end, and what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.runs import records, write_config
from tests.helpers.tiny_models import make_model

STEPS = 3  # of RL
SFT_STEPS = 2


def make(folder: str, kind: str, **changes: Any) -> None:
    """The demo's inputs with another model; called by the runs' prepare."""
    from rlhpc.data.arithmetic import VOCABULARY
    from rlhpc.data.arithmetic import make as make_inputs

    make_inputs(folder)
    model, end = Path(folder) / "model", VOCABULARY.index("<|end|>")
    for file in (*model.glob("*.safetensors"), model / "generation_config.json"):
        file.unlink()
    make_model(model, kind, vocab_size=len(VOCABULARY), max_position_embeddings=64, eos_token_id=end, **changes)


def prepare(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """The section of a run that trains a model of tests.helpers.tiny_models; ``changes``: of its config."""
    arguments = {"folder": str(folder / "inputs"), "kind": kind, **changes}
    return {"function": "tests.trainer.fsdp.inputs:make", "arguments": arguments}


def config(folder: Path, kind: str | None = None, ranks: int = 2, **changes: Any) -> Path:
    """A short warm-up and a few RL steps, whose rewards vary within groups. ``kind``: None for the demo's Qwen2."""
    known: dict[str, Any] = {
        "train__backend": "fsdp",
        "resources__ranks_per_node": ranks,
        "sft__steps": SFT_STEPS,
        "train__steps": STEPS,
        "train__prompts_per_step": 8,
        "train__minibatches": 2,
        "rewards__0__function": "tests.trainer.test_first_rl_step:short_answers",
        "rollout__max_response_tokens": 12,
        "data__validation": [],
    }
    if kind is not None:
        known["prepare"] = prepare(folder, kind)
    return write_config(folder, **{**known, **changes})


def rl_steps(folder: Path) -> list[dict[str, Any]]:
    """Records of the RL steps."""
    return [record for record in records(folder / "run") if record["phase"] == "rl" and record["step"]]


def check_every_step_once(folder: Path) -> None:
    found = [(record["phase"], record["step"]) for record in records(folder / "run")]
    warm_up = [("sft", step) for step in range(1, SFT_STEPS + 1)]
    assert found == [*warm_up, *(("rl", step) for step in range(1, STEPS + 1))]

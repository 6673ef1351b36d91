"""Dynamic RoPE fixed at one length: trainer, engine and exported model rotate alike, as transformers does there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout.any_architecture import rope_cases
from tests.rollout.any_architecture.rope_cases import DYNAMIC, PROMPTS
from tests.rollout.engines import VOCAB, cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]
POSITIONS, TOKENS, FIXED = 64, 160, 512


def make(folder: Path, kind: str = "llama") -> Path:
    own = {"rope_parameters": DYNAMIC, "max_position_embeddings": POSITIONS}
    return make_model(folder, kind, vocab_size=VOCAB, **own)


def tables(folder: Path) -> dict[str, Any]:
    """Largest differences of tables of FIXED positions from that of transformers' dynamic RoPE at this length."""
    import torch

    from rlhpc.backends.megatron.packed import RotaryTable
    from rlhpc.models import read_model

    run = (FIXED, FIXED)
    dynamic = rope_cases.table_of(rope_cases.plain_model(folder), FIXED)
    cos, sin = RotaryTable(read_model(folder, rope_tokens=FIXED), torch.device("cpu"))(torch.arange(FIXED))
    half = dynamic.size(1) // 2
    found = {
        "fsdp": rope_cases.trainer_table(folder, run, FIXED),
        "megatron": torch.cat([cos[:, :half], sin[:, :half]], dim=-1),
        "vllm": rope_cases.engine_table(folder, run),
    }
    return {name: float((table - dynamic).abs().max()) for name, table in found.items()}


def test_tables_are_those_of_transformers_at_the_fixed_length(tmp_path: Path) -> None:
    """transformers computes the base in float32, by which angles differ more the larger they are."""
    found = run_ranks(tables, 1, make(tmp_path))[0]
    assert found.keys() == {"fsdp", "megatron", "vllm"}
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("kind", ["llama", pytest.param("olmo2", marks=pytest.mark.long)])
def test_log_probs_beyond_the_models_positions(tmp_path: Path, kind: str) -> None:
    """Of sequences of any length; the exported model needs no key."""
    folder, exported = make(tmp_path / "model", kind), tmp_path / "exported"
    found = run_ranks(rope_cases.serve, 1, folder, (TOKENS, FIXED), PROMPTS, exported)[0]
    assert max(found.values()) < 1e-5
    fields = json.loads((exported / "config.json").read_text())
    assert fields["max_position_embeddings"] == FIXED
    assert fields["rope_parameters"].keys() == {"rope_type", "rope_theta"}
    assert fields["rope_parameters"]["rope_type"] == "default"


@pytest.mark.long
def test_within_the_models_positions_dynamic_rope_needs_no_key(tmp_path: Path) -> None:
    prompts = [prompt[:20] for prompt in PROMPTS]
    found = run_ranks(rope_cases.serve, 1, make(tmp_path), (POSITIONS, None), prompts)[0]
    assert max(found.values()) < 1e-5

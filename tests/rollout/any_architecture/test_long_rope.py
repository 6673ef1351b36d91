"""LongRoPE: trainer and engine take one table for a run, and its log-probs are those of plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.rollout.any_architecture import rope_cases
from tests.rollout.any_architecture.rope_cases import ORIGINAL, POSITIONS, TOKENS
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]
RUNS = [(length, None) for length in (ORIGINAL, ORIGINAL + 1, TOKENS)]


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("phi3", {}),
        pytest.param("llama", {"factor": 8.0}, marks=pytest.mark.long),
        pytest.param("llama", {"attention_factor": 1.25}, marks=pytest.mark.long),
    ],
)
def test_tables_of_trainer_and_engine_are_equal_at_all_positions(tmp_path: Path, kind: str, rope: dict) -> None:
    """Also where the configuration has a scale of attention that vLLM does not read."""
    folder = rope_cases.make_long(tmp_path, kind, **rope)
    found = run_ranks(rope_cases.table_distances, 1, folder, RUNS, bool(rope))[0]
    assert [positions for positions, _ in found] == [ORIGINAL, POSITIONS, POSITIONS]
    assert max(distance for _, distance in found) < 1e-6


@pytest.mark.parametrize(
    "kind",
    [
        "phi3",
        "olmo2",  # vLLM's Transformers back end, which chooses in each pass
        pytest.param("gemma3", marks=pytest.mark.long),  # tables by kind of layer
        pytest.param("llama", marks=pytest.mark.long),
    ],
)
def test_log_probs_of_a_run_beyond_the_original_length(tmp_path: Path, kind: str) -> None:
    """Short sequences are rotated by the long table too, unlike in transformers."""
    found = run_ranks(rope_cases.serve, 1, rope_cases.make_long(tmp_path, kind), (TOKENS, None))[0]
    assert found["engine"] < 1e-5
    assert found["transformers, long"] < 1e-5
    assert found["transformers, short"] > 0.1


@pytest.mark.long
def test_log_probs_of_a_run_within_the_original_length(tmp_path: Path) -> None:
    folder, prompts = rope_cases.make_long(tmp_path, "phi3"), [prompt[:20] for prompt in rope_cases.PROMPTS]
    found = run_ranks(rope_cases.serve, 1, folder, (ORIGINAL, None), prompts)[0]
    assert max(found.values()) < 1e-5

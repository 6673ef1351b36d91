"""Engines whose ranks are not the job's first ones, and engines across nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Request
from rlhpc.core import env
from rlhpc.rollout.vllm_engine import spans_nodes
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.engines import PROMPTS, Result

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.vllm,
    pytest.mark.long,
    engines.cpu_only,
]


def generate(path: Path) -> tuple[list[Result], str, bool]:
    """With an engine over all ranks of the role, the rank that vLLM knows, and whether the engine spans nodes."""
    tp = int(os.environ[env.WORLD_SIZE])
    engine = engines.build(path, tp)
    engines.write(engine, path, EngineLayout(tp))
    found = engines.greedy(engine)
    engine.shutdown()
    return found, os.environ[env.RANK], spans_nodes(tp)


def test_an_engine_of_the_last_ranks_says_what_one_rank_says(models):
    (alone, *_), *others = run_ranks(generate, 3, models / "qwen2" / "a", roles=(1, 2))
    assert [(rank, spans) for _, rank, spans in others] == [("0", False), ("1", False)]
    for results, *_ in others:
        for (tokens, log_probs), (expected_tokens, expected) in zip(results, alone, strict=True):
            assert tokens == expected_tokens
            np.testing.assert_allclose(log_probs, expected, atol=1e-4)


def sample(path: Path, tp: int) -> tuple[list[Result], str]:
    """Tokens and log-probs, and what the engine's ranks talk through."""
    engine = engines.build(path, tp, expert_parallel=True)
    engines.write(engine, path, EngineLayout(tp, expert_parallel=True))
    requests = [Request(p, seed=i, max_tokens=30, temperature=1.0) for i, p in enumerate(PROMPTS * 2)]
    found = engines.results(engine.generate(requests))
    through = "nothing"
    if tp > 1:
        from vllm.distributed import get_tp_group

        through = getattr(get_tp_group().device_communicator.dist_module, "__name__", "shared memory")
    engine.shutdown()
    return found, through


def sample_on_nodes(path: Path) -> dict[str, Any]:
    """With an engine for each rank, then with one over both, each rank on a node of its own."""
    found: dict[str, Any] = {"near": [spans_nodes(1), spans_nodes(2)], "alone": sample(path, 1)}
    os.environ[env.LOCAL_RANK] = "0"
    return {**found, "far": [spans_nodes(1), spans_nodes(2)], "together": sample(path, 2)}


def test_an_engine_over_two_nodes_says_what_one_rank_says(models):
    ranks = run_ranks(sample_on_nodes, 2, models / "qwen3moe" / "a")
    for rank in ranks:
        assert (rank["near"], rank["far"]) == ([False, False], [False, True])
        assert rank["together"] == ranks[0]["together"]
        found, through = rank["together"]
        assert through == "torch.distributed"
        for (tokens, log_probs), (expected_tokens, expected) in zip(found, rank["alone"][0], strict=True):
            assert tokens == expected_tokens
            np.testing.assert_allclose(log_probs, expected, atol=1e-4)

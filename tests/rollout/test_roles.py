"""Engines whose ranks are not the job's first ones: in a role, vLLM goes by the role's ranks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rlhpc.core import env
from rlhpc.rollout.vllm_engine import spans_nodes
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.engines import Result

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

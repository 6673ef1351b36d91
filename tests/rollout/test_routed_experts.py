"""Routed experts that the engine returns equal HuggingFace's, regardless of caching."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.api import Completion, Request
from rlhpc.core import env
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.test_generate import reference

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

LONG = tuple((11 * i + 5) % 190 + 5 for i in range(300))
# Common prefixes, found in the cache; responses that grow into one more block of it, and of one token.
REQUESTS = [
    *[Request((*LONG, i, *LONG[:20]), seed=i, max_tokens=80, temperature=1.0) for i in range(12)],
    *[Request((7, i), seed=i, max_tokens=1 + i, temperature=1.0) for i in range(8)],
]


def generate(path: Path, tp: int, **section: Any) -> list[Completion]:
    engine = engines.ready(path, tp, routed_experts=True, **section)
    engine.generate(REQUESTS[::3])  # another use of the same cache
    completions = engine.generate(REQUESTS)
    engine.shutdown()
    return completions


def generate_spans_nodes(path: Path) -> list[Completion]:
    """By an engine of two ranks, each on a node of its own; those of one node are in test_weight_sync.py."""
    os.environ[env.LOCAL_RANK] = "0"
    return generate(path, 2)


def generate_all(models: Path) -> dict[str, list[Completion]]:
    """By family; and from a cache so small that requests are put off and begun again."""
    found = {family: generate(models / family / "a", 1) for family in ("mixtral", "qwen3moe", "dsv3")}
    with engines.counted_preemptions() as again:
        found["small cache"] = generate(models / "qwen3moe" / "a", 1, kv_cache_gib=0.0015)
    assert again.call_count
    return found


def own_routed_experts(path: Path, tokens: list[int]) -> np.ndarray:
    """HuggingFace's, [tokens, layers with experts, top_k], sorted."""
    model, routed_experts = reference(path), []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda *call: routed_experts.append(call[2][2])) for router in routers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(routed_experts, dim=1).sort(dim=-1).values.numpy()


@pytest.fixture(scope="module")
def routed(models: Path) -> dict[str, list[Completion]]:
    return run_ranks(generate_all, 1, models)[0]


@pytest.mark.parametrize("case", ["mixtral", "qwen3moe", "dsv3", "small cache"])
def test_routed_experts_are_huggingface_s(routed, models, case):
    path = models / ("qwen3moe" if case == "small cache" else case) / "a"
    for request, completion in zip(REQUESTS, routed[case], strict=True):
        tokens = [*request.prompt, *completion.tokens.tolist()]
        expected = own_routed_experts(path, tokens)[:-1]  # the last token was never given to the model
        assert completion.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(completion.routed_experts, axis=-1), expected)


def test_ranks_of_an_engine_agree_on_routed_experts(models, routed):
    both = run_ranks(generate_spans_nodes, 2, models / "qwen3moe" / "a")
    for ours, theirs, alone in zip(*both, routed["qwen3moe"], strict=True):
        np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)
        np.testing.assert_array_equal(np.sort(ours.routed_experts, axis=-1), np.sort(alone.routed_experts, axis=-1))

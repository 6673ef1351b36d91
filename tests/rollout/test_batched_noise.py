"""vLLM's own sampler for GPUs, with a batch's noise from seeds: the same tokens in any batch, no kernel per request."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rlhpc.rollout.vllm_engine import VllmEngine
from tests.helpers.distributed import run_ranks
from tests.rollout import engines, test_token_seeds
from tests.rollout.test_token_noise import excess
from tests.rollout.test_token_seeds import BUDGET, NOISE, REQUESTS

WAYS = ["alone", "among others", "in chunks", "preempted", "resumed elsewhere", "with guesses"]
pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]


def generate_all(path: Path) -> dict[str, Any]:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from rlhpc.rollout import token_seeds, vllm_cpu
    from rlhpc.rollout.token_noise import TokenNoise

    seed_tokens = token_seeds.seed_tokens

    def seed(runner: Any, guessed: dict[str, list[int]], on_cpu: Any) -> None:
        assert on_cpu is None  # of another sampler
        noise = token_seeds.batched_noise(runner)
        assert noise is not None
        seed_tokens(runner, guessed, noise)

    def build(*arguments: Any, **section: Any) -> VllmEngine:
        return test_token_seeds.build(path, *arguments, **section)

    with (
        mock.patch.object(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_native),
        mock.patch.object(vllm_cpu, "seed_tokens", seed),
        mock.patch.object(TokenNoise, "__call__", autospec=True, side_effect=TokenNoise.__call__) as sampled,
    ):
        large, chunked = build(), build(BUDGET, prefix_caching=False)
        found: dict[str, Any] = test_token_seeds.generate_in_ways(large, chunked)
        found["preempted"] = build(BUDGET, kv_cache_gib=0.0015).generate(REQUESTS)
        # With all tokens equally likely, responses show nothing but their random numbers.
        large.load_weights((name, tensor * (name != "lm_head.weight")) for name, tensor in engines.weights(path))
        before = sampled.call_count
        found["noise"] = large.generate(NOISE)
        found["calls"] = sampled.call_count - before
        always = {"min_match": 1, "min_acceptance": 0.0}
        guessing = build(sampling={"top_k": 190}, speculative=always, prefix_caching=False)
        found["with guesses"] = guessing.generate(REQUESTS)
        guesses = guessing.statistics()
        found["guesses"] = guesses["engine/guess_acceptance_mean"]
    return found


@pytest.fixture(scope="module")
def found(models: Path) -> dict[str, Any]:
    return run_ranks(generate_all, 1, models / "qwen2" / "a")[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_request_samples_the_same_tokens(found: dict[str, Any], way: str) -> None:
    test_token_seeds.check_same_tokens(found, way)


def test_some_guesses_are_right_and_most_are_wrong(found: dict[str, Any]) -> None:
    assert 0 < found["guesses"] < 0.5


def test_a_step_samples_all_requests_at_once(found: dict[str, Any]) -> None:
    assert found["calls"] == NOISE[0].max_tokens
    tokens = np.array([completion.tokens for completion in found["noise"]])
    counts = np.bincount(tokens.ravel(), minlength=engines.VOCAB)
    assert abs(excess(counts, counts.mean())) < 5

"""A request samples the same tokens in any batch, in chunks or at once, preempted, or resumed in another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rlhpc.api import Completion, Request
from rlhpc.rollout import vllm_engine
from rlhpc.rollout.vllm_engine import VllmEngine
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.engines import CONTEXT, VOCAB
from tests.rollout.test_token_noise import excess

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

BUDGET = 48  # tokens of an engine step; the longest prompt takes nine of them
LENGTH = 40
BLOCK = 128  # tokens of a block of the cache on a CPU


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((11 * i + 17 * number) % 190 + 5 for i in range(length))


REQUESTS = [
    Request(prompt(i % 6, length), seed=1000 + i, max_tokens=LENGTH, temperature=1.0, top_p=1.0 if i % 2 else 0.95)
    for i, length in enumerate((400, 3, 330, 96, 250, 1, 400, 330))
]
OTHERS = [Request((9, i), seed=i, max_tokens=10 + i, temperature=0.8) for i in range(20)]
NOISE = [Request((5, 6, 7), seed=seed, max_tokens=100, temperature=1.0) for seed in range(40)]


def build(path: Path, budget: int | None = None, **section: Any) -> VllmEngine:
    """With so many tokens in an engine step, or vLLM's thousands."""
    arguments = vllm_engine.engine_arguments

    def limited(*args: Any, **options: Any) -> dict[str, Any]:
        return arguments(*args, **options) | ({"max_num_batched_tokens": budget} if budget else {})

    with mock.patch.object(vllm_engine, "engine_arguments", limited):
        engine = engines.build(path, **{"max_num_seqs": 40, **section})
    engines.sync(engine, path)
    return engine


def resume(first: VllmEngine, then: VllmEngine, steps: int) -> list[Completion]:
    """Every request begun by one engine and finished by another."""
    for key, request in enumerate(REQUESTS):
        first.submit(key, request)
    for _ in range(steps):
        first.step()
    begun = first.abort(range(len(REQUESTS)))
    assert all(completion.tokens.size for completion in begun.values())
    rest = [
        Request((*r.prompt, *begun[key].tokens.tolist()), r.seed, LENGTH - len(begun[key].tokens), 1.0, r.top_p)
        for key, r in enumerate(REQUESTS)
    ]
    return [
        Completion(np.append(begun[k].tokens, c.tokens), np.append(begun[k].log_probs, c.log_probs), c.truncated)
        for k, c in enumerate(then.generate(rest))
    ]


def generate_in_ways(large: VllmEngine, chunked: VllmEngine) -> dict[str, list[Completion]]:
    return {
        "together": large.generate(REQUESTS),
        "alone": [large.generate([request])[0] for request in REQUESTS],
        "among others": large.generate([*OTHERS[:10], *REQUESTS[::-1], *OTHERS[10:]])[10:18][::-1],
        "in chunks": chunked.generate(REQUESTS),
        "resumed elsewhere": resume(large, chunked, 9),
    }


def check_same_tokens(found: dict[str, Any], way: str) -> None:
    assert len({tuple(completion.tokens) for completion in found["together"]}) == len(REQUESTS)
    for completion, expected in zip(found[way], found["together"], strict=True):
        assert completion.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(completion.log_probs, expected.log_probs, atol=1e-5)


def generate_all(path: Path) -> dict[str, Any]:
    large, chunked = build(path), build(path, BUDGET, prefix_caching=False)
    found: dict[str, Any] = generate_in_ways(large, chunked)
    two_at_once = build(path, CONTEXT, chunked_prefill=False, max_num_seqs=2)
    found["whole prompts, two at once"] = two_at_once.generate(REQUESTS)
    small = build(path, BUDGET, kv_cache_gib=0.0015)
    with engines.counted_preemptions() as preemptions:
        found["preempted"] = small.generate(REQUESTS)
    found["preemptions"], found["statistics"] = preemptions.call_count, small.statistics()
    large.load_weights(engines.weights(path))  # drops cached prefixes
    large.statistics()
    large.generate([Request(prompt(0, 400), seed=i, max_tokens=4, temperature=1.0) for i in range(4)])
    large.submit(0, NOISE[0])
    large.step()
    large.abort([0])
    found["shared prompt"], found["nothing"] = large.statistics(), large.statistics()
    large.generate(
        [Request((*prompt(0, 400), 7, 8), seed=1, max_tokens=2, temperature=1.0, later_turn=True), OTHERS[0]]
    )
    found["later turn"] = large.statistics()
    chunked.statistics()
    chunked.generate(REQUESTS[:2])
    found["no prefix caching"] = chunked.statistics()
    # With all tokens equally likely, responses show nothing but their random numbers.
    large.load_weights((name, tensor * (name != "lm_head.weight")) for name, tensor in engines.weights(path))
    found["noise"] = large.generate(NOISE)
    return found


@pytest.fixture(scope="module")
def found(models: Path) -> dict[str, Any]:
    return run_ranks(generate_all, 1, models / "qwen2" / "a")[0]


@pytest.mark.parametrize(
    "way", ["alone", "among others", "in chunks", "whole prompts, two at once", "preempted", "resumed elsewhere"]
)
def test_a_request_samples_the_same_tokens(found, way):
    check_same_tokens(found, way)
    assert found["preemptions"]


def test_statistics_are_those_of_the_scheduler(found):
    small, shared = found["statistics"], found["shared prompt"]
    assert small["engine/preemptions_sum"] == found["preemptions"]
    assert 0.9 < small["engine/kv_cache_usage_max"] <= 1
    assert 0 < small["engine/kv_cache_usage_mean"] < small["engine/kv_cache_usage_max"]
    assert small["engine/running_requests_mean"] <= small["engine/running_requests_max"] < len(REQUESTS)
    assert small["engine/waiting_requests_max"] == len(REQUESTS) - 1  # the first prompt fills several engine steps
    assert shared["engine/preemptions_sum"] == 0
    blocks = 399 // BLOCK * BLOCK  # all but the last token of a prompt can be cached, in whole blocks
    assert shared["engine/prefix_cache_hit_rate_mean"] == pytest.approx(3 * blocks / (4 * 400 + 3))
    assert shared["engine/running_requests_max"] == 4
    assert found["nothing"] == {}
    assert found["later turn"]["engine/turn_cache_hit_rate_mean"] == pytest.approx(blocks / 402)
    assert shared.keys() - found["no prefix caching"].keys() == {"engine/prefix_cache_hit_rate_mean"}


def test_random_numbers_of_positions_are_independent(found):
    tokens = np.array([completion.tokens for completion in found["noise"]])
    pairs = np.histogram2d(tokens[:, :-1].ravel(), tokens[:, 1:].ravel(), bins=20, range=[(0, VOCAB)] * 2)[0]
    for counts in (np.bincount(tokens.ravel(), minlength=VOCAB), pairs):
        assert counts.mean() > 5
        assert abs(excess(counts, counts.mean())) < 5

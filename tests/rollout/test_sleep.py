"""The KV cache: its memory goes and comes back, and no prefix outlives the weights it was computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.engines import PROMPTS
from tests.rollout.test_generate import log_probs_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

CACHE_BYTES = 320 << 20


def _caches(engine: engines.VllmEngine) -> list[Any]:
    return engines.worker(engine).model_runner.kv_caches


def sleep_and_wake(path: Path) -> dict[str, Any]:
    engine = engines.ready(path, kv_cache_gib=CACHE_BYTES / (1 << 30))
    before = engines.greedy(engine)
    found = {}
    for cache in _caches(engine):
        cache.fill_(float("nan"))
    found["awake"] = engines.resident_bytes()
    engine.sleep()
    found["asleep"] = engines.resident_bytes()
    engines.sync(engine, path)
    found["same"] = engines.greedy(engine) == before
    found["size"] = sum(cache.untyped_storage().nbytes() for cache in _caches(engine))
    found["used"] = engines.resident_bytes()
    return found


def test_sleep_gives_the_cache_s_memory_back(models):
    found = run_ranks(sleep_and_wake, 1, models / "qwen2" / "a")[0]
    assert found["size"] > 0.95 * CACHE_BYTES
    assert found["awake"] - found["asleep"] > 0.95 * CACHE_BYTES
    assert found["same"]
    assert found["used"] - found["asleep"] < 0.5 * CACHE_BYTES  # only the touched part comes back


def sync_without_sleep(a: Path, b: Path) -> list[engines.Result]:
    engine = engines.ready(a)
    engines.greedy(engine)
    engine.load_weights(engines.weights(b))
    return engines.greedy(engine)


def test_prefixes_of_old_weights_are_not_used(models):
    a, b = models / "qwen2" / "a", models / "qwen2" / "b"
    found = run_ranks(sync_without_sleep, 1, a, b)[0]
    for prompt, (tokens, log_probs) in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(log_probs, log_probs_of(b, prompt, tokens, 1.0), atol=1e-4)

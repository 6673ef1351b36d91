"""After a weight sync the engine is the one that would have loaded the same weights from disk, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.engines import FAMILIES

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]


def sync_families(models: Path, tp: int) -> dict[str, dict[str, Any]]:
    found = {}
    for family in FAMILIES:
        a, b = models / family / "a", models / family / "b"
        stock = engines.stock_greedy(b, tp)
        engine = engines.ready(a, tp)
        before = engines.greedy(engine)
        packed_before = engines.packed_linears(engine)
        engine.sleep()
        engines.sync(engine, b)
        after = engines.greedy(engine)
        engines.write(engine, a, EngineLayout(tp))  # without a sleep between
        written_before = engines.greedy(engine)
        engine.sleep()
        engines.write(engine, b, EngineLayout(tp))
        written = engines.greedy(engine)
        engine.load_weights(engines.weights(a))
        found[family] = {
            "stock": stock,
            "before": before,
            "after": after,
            "written": (written_before, written),
            "again": engines.greedy(engine),
            "packed": (packed_before, engines.packed_linears(engine)),
            "segments": [file.name for file in Path("/dev/shm").glob(f"{engines.worker(engine)._segment}-*")],
        }
        engine.shutdown()
    return found


# Engines of four: tests/reshard/test_weight_sync.py
@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def synced(request: pytest.FixtureRequest, models: Path) -> list[dict[str, dict[str, Any]]]:
    """What each rank found, at tensor-parallel size 1 and 2."""
    return run_ranks(sync_families, request.param, models, request.param, timeout=900)


@pytest.mark.parametrize("family", FAMILIES)
def test_synced_weights_equal_a_fresh_load_from_disk(synced, family):
    for rank in synced:
        tokens, log_probs = zip(*rank[family]["after"], strict=True)
        stock_tokens, stock_log_probs = zip(*rank[family]["stock"], strict=True)
        assert tokens == stock_tokens
        assert log_probs == stock_log_probs
        assert tokens != tuple(tokens for tokens, _ in rank[family]["before"])
        assert rank[family]["again"] == rank[family]["before"]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_written_in_place_equal_a_fresh_load_from_disk(synced, family):
    for rank in synced:
        first, second = rank[family]["written"]
        assert first == rank[family]["before"]
        assert second == rank[family]["stock"]


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_stay_packed(synced, family):
    before, after = synced[0][family]["packed"]
    assert before == after
    assert after[0] >= 6
    assert after[1] - after[0] == (2 if family == "dsv3" else 0)  # kv_b_proj, which is multiplied in parts


def test_ranks_of_an_engine_agree(synced):
    assert all(rank[family]["after"] == synced[0][family]["after"] for rank in synced for family in FAMILIES)


@pytest.mark.parametrize("synced", [2], indirect=True)
def test_no_shared_memory_outlives_its_ranks(synced):
    assert all(rank[family]["segments"] == [] for rank in synced for family in FAMILIES)


def sync_often(path: Path, times: int, write: Callable[[engines.VllmEngine, Path], None]) -> tuple[list[int], bool]:
    """Resident bytes after every weight sync, and whether the last engine still answers like the first."""
    engine = engines.build(path)
    resident = []
    for index in range(times):
        write(engine, path)
        if index == 0:
            first = engines.greedy(engine)
        resident.append(engines.resident_bytes())
    return resident, engines.greedy(engine) == first


@pytest.mark.parametrize("write", [engines.sync, engines.write])
@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.long), "dsv3"])
def test_a_hundred_weight_syncs_do_not_leak(models, family, write):
    (resident, same) = run_ranks(sync_often, 1, models / family / "a", 110, write)[0]
    weights = (models / family / "a" / "model.safetensors").stat().st_size
    assert resident[-1] - resident[9] < 5 * weights  # 100 weight syncs that each left a tenth behind would be 10 times
    assert same


def refuse_incomplete(path: Path) -> str:
    engine = engines.build(path)
    engine.wake_weights()
    try:
        engine.load_weights((name, tensor) for name, tensor in engines.weights(path) if "layers.1.mlp.down" not in name)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_missing_weight_is_named(models):
    assert "model.layers.1.mlp.down_proj.weight" in run_ranks(refuse_incomplete, 1, models / "llama" / "a")[0]
